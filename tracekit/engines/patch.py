"""The table of patch points: what is replaced in an engine while a recording runs, and put back by structure.

Every replacement is entered on an `ExitStack`, so leaving the recording restores the original objects in
the reverse order, whatever happened in between. Off means off: tests compare with `is`.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tracekit.errors import Unsupported

_ABSENT = object()


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
