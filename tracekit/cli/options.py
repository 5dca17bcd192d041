"""Options that several verbs share, and the parsing of their values."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from tracekit.errors import UsageError
from tracekit.gate.recorded import Judgement, Legality

Command = TypeVar("Command", bound=Callable[..., Any])


def json_option(function: Command) -> Command:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(
        function
    )


def parse_numbers(text: str | None, option: str) -> frozenset[int] | None:
    """Parse `0,3,5-7` into a set of numbers; None stays None (no filter).

    Raises:
        UsageError: `U-NUMBERS` when a part is neither a number nor a range.
    """
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first > 100_000:
            raise UsageError(
                f"{option} takes numbers and ranges such as 0,3,5-7, not {text!r}.",
                rule="U-NUMBERS",
                option=option,
                value=text,
            )
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def parse_names(text: str | None) -> tuple[str, ...] | None:
    """Parse `a,b` into names; None stays None."""
    if text is None:
        return None
    return tuple(name.strip() for name in text.split(",") if name.strip())


def history_words(judgement: Judgement) -> str:
    """Return what was found of a history, with the place where a rule is broken."""
    if judgement.status is not Legality.ILLEGAL:
        return f"{judgement.status}: {judgement.reason}"
    place = ", ".join(f"{name} {value}" for name, value in judgement.place.items())
    return f"ILLEGAL {judgement.code} at {place}: {judgement.reason}"


def size_words(count: float) -> str:
    """Return a size in bytes for people: `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
