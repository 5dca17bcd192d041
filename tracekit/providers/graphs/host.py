"""The stand-in for a device: calls of CPU kernels, frozen with their arguments and replayed as they were.

A kernel that is reached through ctypes is called by `launch`, a torch operator as always. While a capture is
under way neither runs for the sake of its result; at a replay the same functions get the same argument bytes
and addresses. So plans that were made for other lengths, addresses of buffers that moved, lengths passed by
value and slots that nobody writes go wrong here as they do on a GPU. What a stand-in cannot show is what
belongs to a device alone: streams, its allocator, its compiler.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tracekit.errors import ProviderFailed
from tracekit.model import Array
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.graphs.pool import HostPool
from tracekit.providers.guarded import filled_heap
from tracekit.providers.placement import Fill

Step = Callable[[], None]

_under_way: ContextVar[list[Step] | None] = ContextVar("_under_way", default=None)


@dataclass(frozen=True)
class Frozen:
    """A call of a C function that takes a block of arguments.

    Args:
        entry: the function; a result other than 0 is a failure.
        arguments: a copy of the block.
        scalars: further arguments, by value; a pointer among them keeps its address.
        memory: owners of what the block points to. They keep it mapped, for a stale address must give wrong
            numbers and not end the process; they do not keep it from being used again (`HostPool`).
    """

    entry: Callable[..., int]
    arguments: ctypes.Structure
    scalars: tuple[Any, ...]
    memory: tuple[Array, ...]

    def __call__(self) -> int:
        """Call it."""
        return self.entry(ctypes.byref(self.arguments), *self.scalars)

    def replay(self) -> None:
        """Call it once more; ProviderFailed where it fails."""
        if code := self():
            raise ProviderFailed(f"a replayed kernel failed with {code}.", rule="P-GRAPH")


def launch(
    entry: Callable[..., int], arguments: ctypes.Structure, *scalars: Any, memory: tuple[Array, ...] = ()
) -> int:
    """Call a kernel, or freeze the call where a capture is under way; returns its result, 0 when frozen."""
    steps = _under_way.get()
    if steps is None:
        return entry(ctypes.byref(arguments), *scalars)
    copy = type(arguments).from_buffer_copy(arguments)
    owners = tuple(array if array.base is None else array.base for array in memory)
    steps.append(Frozen(entry, copy, scalars, owners).replay)
    return 0


@dataclass(frozen=True)
class HostGraph:
    """What a capture froze, in order."""

    steps: tuple[Step, ...]

    def replay(self) -> None:
        """Take the steps again."""
        for step in self.steps:
            step()


class HostGraphs:
    """The backend of the stand-in."""

    kind = GraphKind.HOST

    def pool(self) -> HostPool:
        """Return an empty pool."""
        return HostPool()

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run it once: nothing is compiled here."""
        work()

    def sync_guard(self) -> AbstractContextManager[None]:
        """Refuse torch operators that read a result. What numpy reads cannot be seen."""
        return nullcontext() if "torch" not in sys.modules else _torch_steps([])

    def capture(self, work: Callable[[], None], pool: HostPool) -> HostGraph:
        """Freeze what `work` calls.

        Raises:
            ProviderFailed: `P-GRAPH`, it calls nothing, or an operator that reads a result.
        """
        steps: list[Step] = []
        token = _under_way.set(steps)
        try:
            with nullcontext() if "torch" not in sys.modules else _torch_steps(steps):
                work()
        finally:
            _under_way.reset(token)
        if not steps:
            raise ProviderFailed("nothing was launched while the graph was captured.", rule="P-GRAPH")
        return HostGraph(tuple(steps))

    def scratch(self, fill: Fill) -> AbstractContextManager[None]:
        """Fill what the C library hands out."""
        return filled_heap(fill)

    def unrelated(self, pool: HostPool, fill: Fill) -> None:
        """Write over all free blocks of the pool."""
        pool.use_up(fill)

    def wait(self) -> None:
        """Nothing is pending: a call of a CPU kernel returns when it is done."""


@contextmanager
def _torch_steps(steps: list[Step]) -> Iterator[None]:
    # only where torch is loaded already: a kernel behind ctypes needs none
    from tracekit.providers.graphs.host_torch import recorded

    with recorded(steps):
        yield
