"""`host-graph`: frozen calls of a kernel, replayed on other inputs, give the eager bits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from tracekit.controls.host_graph import StalePlan
from tracekit.model import AttentionCall
from tracekit.providers.base import Capabilities, Execution, Launch, Provider
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.padding import padded, real_rows
from tracekit.providers.placement import Padding, Placement
from tracekit.relations.base import Expectation, Variant
from tracekit.relations.company import companion, end_of_longest, first_position

SLOTS = 3
"""Empty query slots of a graph that is larger than its batch: two before the rows, one behind."""


@dataclass(frozen=True)
class Replayed:
    """What `host-graph` and `graph` share.

    Args:
        captured: whether launches of the kernel can be captured there.
        slots: empty query slots of a batch that is smaller than its graph.
    """

    captured: bool = False
    slots: int = 0
    kind: ClassVar[GraphKind]
    nowhere: ClassVar[str]
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def on(self, capabilities: Capabilities) -> Self:
        """Ask a kernel that can be captured, with empty query slots where it takes those."""
        slots = SLOTS if Padding.ROWS in capabilities.padding else 0
        return type(self)(self.kind in capabilities.graphs, slots)

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a kernel whose launches can be captured."""
        return None if self.captured else self.nowhere

    def subject(self, call: AttentionCall) -> AttentionCall:
        """Return the call with empty slots: what an eager launch leaves in them, a replay must leave too."""
        return padded(call, Placement(padding={Padding.ROWS: self.slots})) if self.slots else call

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield replays with lengths, numbers and requests that were others at capture, and again.

        A launch is captured with its first call; the calls of other requests are run, and not compared.
        """
        live = call.take(real_rows(call)) if self.slots else call
        short = companion(live, first_position(live), live.num_rows, 0)
        long = companion(live, end_of_longest(live), live.num_rows, 1)
        yield self._variant("captured with shorter requests", short, live, long, live)
        yield self._variant("captured with longer requests", long, live, live)
        full = companion(call, end_of_longest(call), call.num_rows, 2)
        empty = " with empty slots" if self.slots else ""
        yield self._variant(f"captured as it stands{empty}", call, full, call, call)

    def _variant(self, name: str, *calls: AttentionCall) -> Variant:
        return Variant(name, Launch(calls, Execution(graph=self.kind)))


@dataclass(frozen=True)
class HostGraph(Replayed):
    """A replay of frozen calls is the launch."""

    id: ClassVar[str] = "host-graph"
    kind: ClassVar[GraphKind] = GraphKind.HOST
    nowhere: ClassVar[str] = "launches of the kernel cannot be captured on the host"
    promise: ClassVar[str] = "frozen calls of the kernel, replayed on other inputs, give the eager bits"

    def broken(self) -> Provider:
        """Return a kernel whose plan stays that of the capture."""
        return StalePlan()
