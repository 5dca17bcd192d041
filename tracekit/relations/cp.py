"""`cp`: context-parallel ranks, each with its tokens and its KV, give the bits of one process."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tracekit.controls.cp import Bfloat16Partials
from tracekit.model import TKA1_REDUCTION, AttentionCall
from tracekit.providers.base import Capabilities, Provider
from tracekit.providers.split import Sequence, Split
from tracekit.relations.base import Expectation, Variant
from tracekit.relations.splits import cannot_split, of_split

DEGREES = (2, 3, 4)


@dataclass(frozen=True)
class ContextRanks:
    """Which rank holds a token is no part of the answer, as long as no leaf has two owners.

    Args:
        splits: whether the kernel gives partials of aligned leaves.
    """

    splits: bool = False
    id: ClassVar[str] = "cp"
    promise: ClassVar[str] = "context-parallel ranks, contiguous and zigzag, give the bits of one process"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def on(self, capabilities: Capabilities) -> "ContextRanks":
        """Ask a kernel that gives partials."""
        return ContextRanks(capabilities.splits)

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a kernel that gives partials, and a row that reads two leaves."""
        return cannot_split(call, self.splits)

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield 2, 3 and 4 ranks, contiguous and zigzag, and some with splits and in another arrival.

        Where there are fewer leaves than ranks, some ranks hold nothing.
        """
        for ranks in DEGREES:
            for sequence in Sequence:
                yield of_split(call, Split(context=ranks, sequence=sequence))
        leaf = TKA1_REDUCTION.leaf
        yield of_split(call, Split(context=2, sequence=Sequence.ZIGZAG, rows=leaf, arrival=seed + 1))

    def broken(self) -> Provider:
        """Return a kernel that exchanges its partials in bfloat16."""
        return Bfloat16Partials()
