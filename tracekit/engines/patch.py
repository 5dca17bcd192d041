"""The table of patch points: what is replaced in an engine while a recording runs, and put back by structure.

Every replacement is entered on an `ExitStack`, so leaving the recording restores the original objects in
the reverse order, whatever happened in between. Off means off: tests compare with `is`.
"""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

_ABSENT = object()


class Removable(Protocol):
    """What engines give back for a hook."""

    def remove(self) -> None:
        """Take the hook away."""
        ...


@dataclass(frozen=True)
class Entry:
    """One key of a mapping that gets another value, such as a row of a dispatch table.

    Args:
        name: for messages and the ledger.
        mapping: the table.
        key: the row.
        make: makes the new value out of the old one, which is None where there was none.
    """

    name: str
    mapping: MutableMapping[str, Any]
    key: str
    make: Callable[[Any], Any]


@contextmanager
def replaced(entry: Entry) -> Iterator[Any]:
    """Replace an entry; the original object, or its absence, comes back at exit."""
    original = entry.mapping.get(entry.key, _ABSENT)
    entry.mapping[entry.key] = entry.make(None if original is _ABSENT else original)
    try:
        yield
    finally:
        if original is _ABSENT:
            del entry.mapping[entry.key]
        else:
            entry.mapping[entry.key] = original


def enter_all(stack: ExitStack, entries: list[Entry], hooks: list[Callable[[], Removable]]) -> None:
    """Enter every entry and hook on a stack."""
    for entry in entries:
        stack.enter_context(replaced(entry))
    for register in hooks:
        stack.callback(register().remove)
