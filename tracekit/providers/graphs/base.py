"""What is captured, who captures it, and in which order a capture is put to the test.

A captured graph holds kernels, addresses and the arguments that were passed by value. Python does not run
again at a replay: what changes from one replay to the next must be written into the same buffers. So a
provider whose launches can be captured gives a `StaticLaunch`, and only its `enqueue` is captured.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from tracekit.model import AttentionCall, ExecutedIdentity
from tracekit.providers.base import Execution, Tensors
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.placement import Fill

Pool = Any
"""Memory that captures share; only the backend that made it knows what it is."""


class Graph(Protocol):
    """Launches that were captured: the same kernels, addresses and arguments each time."""

    def replay(self) -> None:
        """Launch them again."""
        ...


class GraphBackend(Protocol):
    """Who captures."""

    kind: GraphKind

    def pool(self) -> Pool:
        """Return memory for captures; static buffers of a launch on the host are taken from it too."""
        ...

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run what will be captured: compilation, tuning and first allocations belong before a capture."""
        ...

    def sync_guard(self) -> AbstractContextManager[None]:
        """Refuse, inside, whatever waits for the device or reads a result: a capture can hold neither."""
        ...

    def capture(self, work: Callable[[], None], pool: Pool) -> Graph:
        """Capture what `work` launches, under the guard.

        Raises:
            ProviderFailed: `P-GRAPH`, nothing was launched, or something that cannot be captured.
        """
        ...

    def scratch(self, fill: Fill) -> AbstractContextManager[None]:
        """Let memory that a kernel asks for inside hold a fill, where that can be arranged."""
        ...

    def unrelated(self, pool: Pool, fill: Fill) -> None:
        """Do other work: take what memory is free, write it full, and give it back."""
        ...

    def wait(self) -> None:
        """Wait for what was launched."""
        ...


class StaticLaunch(Protocol):
    """One launch whose buffers stay where they are, with room for several calls."""

    def load(self, call: AttentionCall) -> None:
        """Write the inputs of a call into the buffers, in place.

        What depends on lengths and is computed by the host, a plan or metadata, belongs here too.
        """
        ...

    def enqueue(self) -> None:
        """Launch the kernel on the buffers; nothing else, and nothing that waits."""
        ...

    def poison(self, fill: Fill) -> None:
        """Fill outputs, and workspaces that the launch owns."""
        ...

    def read(self) -> Tensors:
        """Return a copy of the answer to the call that was loaded last, its rows in order."""
        ...

    def changed(self) -> str | None:
        """Return the name of an input that is not as it was loaded, or None."""
        ...

    def executed(self) -> ExecutedIdentity:
        """Return what ran."""
        ...


@runtime_checkable
class Capturable(Protocol):
    """What a provider adds whose launches can be captured; its capabilities say where (`graphs`)."""

    def static(self, calls: Sequence[AttentionCall], execution: Execution, pool: Pool) -> StaticLaunch:
        """Return a launch with room for each of some calls, which have equally many rows.

        Raises:
            Unsupported: `P-GRAPH`, the calls cannot share a launch.
        """
        ...
