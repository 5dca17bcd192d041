"""`slack`: what stands in memory that belongs to no row changes no bit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tracekit.controls.slack import WeightZero
from tracekit.model import AttentionCall
from tracekit.providers.base import Capabilities, Execution, Launch, Provider
from tracekit.providers.placement import Fill, Padding, Placement
from tracekit.relations.base import Expectation, Variant

SLOTS = 7


@dataclass(frozen=True)
class Slack:
    """Nobody reads what nobody wrote, and nobody writes beside his own buffer.

    Args:
        fills: whether the kernel can be asked what stands there.
        slots: query slots that are added to a launch.
    """

    fills: bool = False
    slots: int = 0
    id: ClassVar[str] = "slack"
    promise: ClassVar[str] = "what stands in memory that belongs to no row changes no bit"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def on(self, capabilities: Capabilities) -> "Slack":
        """Ask a kernel that takes fills, with empty query slots where it takes those."""
        return Slack(capabilities.fills, SLOTS if Padding.ROWS in capabilities.padding else 0)

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a kernel whose memory can be filled."""
        return None if self.fills else "the kernel takes no fill of its memory"

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call with each fill: around pages in order, and around scattered ones and empty slots."""
        for fill in Fill:
            yield _variant(f"{fill} in tails and the null page", call, Placement(fill=fill))
            added = {Padding.ROWS: self.slots} if self.slots else {}
            where = Placement(shuffle=seed, gaps=1, padding=added, fill=fill)
            yield _variant(f"{fill} in unused pages{' and query slots' if added else ''}", call, where)

    def broken(self) -> Provider:
        """Return a kernel that multiplies by zero where it should leave out."""
        return WeightZero()


def _variant(name: str, call: AttentionCall, placement: Placement) -> Variant:
    return Variant(name, Launch((call,), Execution(placement=placement)))
