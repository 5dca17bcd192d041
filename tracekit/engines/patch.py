"""The table of patch points: what is replaced in an engine while a recording runs, and put back by structure.

Every replacement is entered on an `ExitStack`, so leaving the recording restores the original objects in
the reverse order, whatever happened in between. Off means off: tests compare with `is`.
"""

import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tracekit.errors import Unsupported

_ABSENT = object()
_ENDED: dict[int, tuple[Any, Any]] = {}
"""Replacements that ended while a later one stood on them, by id, and what was there before them."""


class UntestedVersion(UserWarning):
    """The engine is not one of the versions that the recorder was made for."""


@dataclass(frozen=True)
class Versions:
    """The versions of an engine that the recorder was made for: from the first up to, not including, the end.

    Outside it a layer must pass a check of its conventions before it is recorded, and the trace says so.
    """

    first: tuple[int, int]
    end: tuple[int, int]

    def hold(self, version: str) -> bool:
        """Whether a version lies in the window; one that cannot be read does not."""
        numbers = re.match(r"(\d+)\.(\d+)", version)
        return numbers is not None and self.first <= (int(numbers[1]), int(numbers[2])) < self.end

    def __str__(self) -> str:
        return " .. ".join(".".join(map(str, version)) for version in (self.first, self.end))


EVIDENCE = "by signature, untested on hardware"
"""What a trace says of a kernel that the recorder knows from its sources alone."""


class Arguments:
    """Reads the arguments of an engine's function by name, in whatever order it is called with them.

    A hook passes on what it gets and asks here afterwards, so that a function that has changed breaks the
    hook, which tells the ledger, and not the engine.

    Args:
        function: the engine's own.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = getattr(function, "__name__", type(function).__name__)
        self._signature = inspect.signature(function)

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
        """Return some arguments of a call.

        Raises:
            Unsupported: `E-HOOK` when the function has none of a name.
        """
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        gone = [name for name in names if name not in bound.arguments]
        if gone:
            raise Unsupported(
                f"{self._name} takes no {', '.join(gone)} any more: this engine is too new for the recorder. "
                "Install a tested version (docs/engines.md).",
                rule="E-HOOK",
                hook=gone,
            )
        return tuple(bound.arguments[name] for name in names)


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


class Attributes(MutableMapping[str, Any]):
    """The own attributes of an object as a table for an `Entry`; empty when the object is gone.

    Args:
        owner: held weakly.
    """

    def __init__(self, owner: object) -> None:
        self._owner = weakref.ref(owner)

    def _table(self) -> dict[str, Any]:
        owner = self._owner()
        return {} if owner is None else vars(owner)

    def __getitem__(self, key: str) -> Any:
        return self._table()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._table()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._table()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table())

    def __len__(self) -> int:
        return len(self._table())


@contextmanager
def replaced(entry: Entry) -> Iterator[Any]:
    """Replace an entry; the original object, or its absence, comes back at exit.

    Recordings of several models may end in any order: the last one brings the original back.
    """
    mapping, key = entry.mapping, entry.key
    original = mapping.get(key, _ABSENT)
    mapping[key] = value = entry.make(None if original is _ABSENT else original)
    # What makes the value may hold much else, such as a model that the program wants to be rid of.
    del entry
    try:
        yield
    finally:
        if mapping.get(key, _ABSENT) is value:
            while id(original) in _ENDED:
                _, original = _ENDED.pop(id(original))
            if original is _ABSENT:
                del mapping[key]
            else:
                mapping[key] = original
        elif key in mapping:
            _ENDED[id(value)] = value, original


def enter_all(stack: ExitStack, entries: list[Entry], hooks: list[Callable[[], Removable]]) -> None:
    """Enter every entry and hook on a stack."""
    for entry in entries:
        stack.enter_context(replaced(entry))
    for register in hooks:
        stack.callback(register().remove)
