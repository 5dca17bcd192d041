"""Canonical JSON: one text for one value, and a parser that refuses every other text."""

import json
from collections.abc import Mapping
from typing import Any

from tracekit.errors import Unsupported
from tracekit.store.limits import MAX_TEXT
from tracekit.store.rules import corrupt


def canonical(value: Any) -> bytes:
    """Return canonical JSON: ASCII, keys sorted, no spaces.

    Raises:
        Unsupported: S-TEXT, the value is no JSON (a NaN, an object).
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Unsupported(
            f"A description cannot be stored as JSON ({error}); use text, numbers and None.", rule="S-TEXT"
        ) from None


def parse_canonical(text: bytes, where: str) -> Any:
    """Parse canonical JSON.

    Raises:
        TraceCorrupt: E-15 when the text is not canonical.
    """
    try:
        if len(text) > MAX_TEXT:
            raise ValueError("too long")
        value = json.loads(text.decode("ascii"))
        if canonical(value) != text:
            raise ValueError("another spelling is canonical")
    except (ValueError, RecursionError, Unsupported) as error:
        raise corrupt("E-15", f"{where} is not canonical JSON ({error}).", where=where) from None
    return value


def parse_object(value: Any, kinds: Mapping[str, tuple[type, ...]], where: str) -> dict[str, Any]:
    """Return an object with exactly these keys, each of one of its types; a bool is no integer here.

    Raises:
        TraceCorrupt: E-15.
    """
    if type(value) is not dict or set(value) != set(kinds):
        named = sorted(value) if type(value) is dict else type(value).__name__
        raise corrupt("E-15", f"{where} has the fields {sorted(kinds)}, not {named}.", where=where)
    for name, allowed in kinds.items():
        if type(value[name]) not in allowed:
            raise corrupt(
                "E-15",
                f"{where}: {name} is {' or '.join(kind.__name__ for kind in allowed)}, "
                f"not {type(value[name]).__name__}.",
                where=where,
                field=name,
            )
    return value


def parse_strings(value: Any, where: str) -> dict[str, str]:
    """Return an object whose values are all strings.

    Raises:
        TraceCorrupt: E-15.
    """
    if type(value) is not dict or any(type(item) is not str for item in value.values()):
        raise corrupt("E-15", f"{where} maps text to text.", where=where)
    return value
