"""The history of a recording as bytes: canonical JSON, one list an entry, its name first."""

from dataclasses import fields
from typing import Any

from tracekit.model import KVFamily
from tracekit.model.events import (
    Adopt,
    Capture,
    Evict,
    Fence,
    Finish,
    Fork,
    GateMode,
    GraphUse,
    Migrate,
    NewWeights,
    Preempt,
    Rescale,
    ResetCache,
    Rollback,
    Sleep,
    Wake,
)
from tracekit.model.history import Entry, Pass, PassBackward, PassRows
from tracekit.store.canonical import canonical, parse_canonical
from tracekit.store.limits import MAX_NUMBER
from tracekit.store.rules import corrupt

KINDS: dict[str, type[Any]] = {
    "pass": Pass,
    "backward": PassBackward,
    "preempt": Preempt,
    "rollback": Rollback,
    "fork": Fork,
    "adopt": Adopt,
    "evict": Evict,
    "finish": Finish,
    "migrate": Migrate,
    "new weights": NewWeights,
    "reset cache": ResetCache,
    "rescale": Rescale,
    "sleep": Sleep,
    "wake": Wake,
    "fence": Fence,
    "capture": Capture,
}
_NAMES = {kind: name for name, kind in KINDS.items()}
_OPTIONAL: dict[type[Any], int] = {Pass: 2}
"""Lists at the end of an entry that are left out as long as they are empty."""


def history_to_bytes(history: tuple[Entry, ...]) -> bytes:
    """Return the entries; a name, and then the fields in the order of their class."""
    return canonical([[_NAMES[type(entry)], *_fields(entry)] for entry in history])


def parse_history(data: bytes) -> tuple[Entry, ...]:
    """Parse what `history_to_bytes` returns.

    Raises:
        TraceCorrupt: E-15.
    """
    lines = parse_canonical(data, "history")
    if type(lines) is not list:
        raise _bad("it is a list of entries")
    return tuple(_entry(line, number) for number, line in enumerate(lines))


def _fields(entry: Entry) -> list[Any]:
    values = [getattr(entry, field.name) for field in fields(entry)]
    for _ in range(_OPTIONAL.get(type(entry), 0)):
        if values[-1] == ():
            values.pop()
    return values


def _entry(line: Any, number: int) -> Entry:
    kind = KINDS.get(line[0]) if type(line) is list and line and type(line[0]) is str else None
    if kind is None:
        raise _bad(f"entry {number} has no known name")
    values = line[1:]
    expected = [field.type for field in fields(kind)]
    least = len(expected) - _OPTIONAL.get(kind, 0)
    if not least <= len(values) <= len(expected):
        raise _bad(f"entry {number} has {len(values)} fields, and {line[0]} has {len(expected)}")
    if len(values) > least and values[-1] == []:
        raise _bad(f"entry {number} ends in an empty list")
    found: Entry = kind(*(_parse(value, want, number) for value, want in zip(values, expected, strict=False)))
    return found


def _parse(value: Any, want: Any, number: int) -> Any:
    match want:
        case _ if want is int:
            if type(value) is int and 0 <= value < MAX_NUMBER:
                return value
        case _ if want is bool:
            if type(value) is bool:
                return value
        case _ if want is str:
            if type(value) is str:
                return value
        case _ if want is KVFamily:
            if value in list(KVFamily):
                return KVFamily(value)
        case _ if want is GraphUse:
            return _graph(value, number)
        case _ if want == int | None:
            return None if value is None else _parse(value, int, number)
        case _ if want == KVFamily | None:
            return None if value is None else _parse(value, KVFamily, number)
        case _ if want == tuple[int, ...]:
            if type(value) is list:
                return tuple(_parse(number_of, int, number) for number_of in value)
        case _ if want == tuple[PassRows, ...]:
            if type(value) is list:
                return tuple(_rows(row, number) for row in value)
    raise _bad(f"entry {number} holds {value!r:.40}")


def _rows(row: Any, number: int) -> PassRows:
    if type(row) is not list or len(row) != 5 or row[3] not in list(GateMode):
        raise _bad(f"entry {number} has rows {row!r:.40}")
    request, first, end, mode, version = row
    first, end, version = (_parse(value, int, number) for value in (first, end, version))
    return PassRows(_parse(request, str, number), first, end, GateMode(mode), version)


def _graph(value: Any, number: int) -> GraphUse:
    if type(value) is not list or len(value) != 3 or type(value[1]) is not list:
        raise _bad(f"entry {number} has a graph {value!r:.40}")
    addresses = tuple(_parse(address, int, number) for address in value[1])
    return GraphUse(_parse(value[0], str, number), addresses, _parse(value[2], int, number))


def _bad(problem: str) -> Exception:
    return corrupt("E-15", f"The history cannot be read: {problem}.", where="history")
