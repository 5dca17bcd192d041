"""`tp`: tensor-parallel ranks, each with its heads, give the bits of one process."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tracekit.controls.tp import RanksOutOfOrder
from tracekit.model import AttentionCall
from tracekit.providers.base import Capabilities, Provider
from tracekit.providers.split import Sequence, Split
from tracekit.relations.base import Expectation, Variant
from tracekit.relations.splits import cannot_split, of_split


@dataclass(frozen=True)
class TensorRanks:
    """Which rank computes a head is no part of the answer.

    Args:
        splits: whether the kernel can work as ranks.
    """

    splits: bool = False
    id: ClassVar[str] = "tp"
    promise: ClassVar[str] = (
        "tensor-parallel ranks give the bits of one process, alone and with context ranks"
    )
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def on(self, capabilities: Capabilities) -> "TensorRanks":
        """Ask a kernel that works as ranks."""
        return TensorRanks(capabilities.splits)

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a kernel that works as ranks, and heads that divide."""
        if not self.splits:
            return "the kernel does not work as ranks"
        return None if _degrees(call) else f"{call.num_heads} heads do not divide over ranks"

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield every number of ranks that the heads divide over; more than KV heads hold copies of them.

        And, where KV can be split, the smallest of them with two context ranks each.
        """
        degrees = _degrees(call)
        for ranks in degrees:
            yield of_split(call, Split(tensor=ranks))
        if cannot_split(call, self.splits) is None:
            yield of_split(call, Split(tensor=degrees[0], context=2, sequence=Sequence.ZIGZAG))

    def broken(self) -> Provider:
        """Return a kernel that puts the heads of its ranks together in the order in which they end."""
        return RanksOutOfOrder()


def _degrees(call: AttentionCall) -> list[int]:
    """The numbers of ranks that the heads divide over."""
    heads, kv = call.num_heads, call.num_kv_heads
    return [n for n in range(2, heads + 1) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]
