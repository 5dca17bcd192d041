"""`splits`: KV cut into splits whose partials merge in the declared tree gives the bits of one pass."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tracekit.controls.splits import BaseTwoPartials
from tracekit.model import TKA1_REDUCTION, AttentionCall, Ranges
from tracekit.providers.base import Capabilities, Execution, Launch, Provider
from tracekit.providers.split import Split
from tracekit.relations.base import Expectation, Variant

SIZES = (1, 2, 8)
"""Leaves of a split."""


@dataclass(frozen=True)
class Splits:
    """How KV is split is no part of the answer, as long as no cut lies inside a leaf.

    Args:
        splits: whether the kernel gives partials of aligned leaves.
    """

    splits: bool = False
    id: ClassVar[str] = "splits"
    promise: ClassVar[str] = "the partials of any splits of KV merge to the bits of one pass, in any arrival"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def on(self, capabilities: Capabilities) -> "Splits":
        """Ask a kernel that gives partials."""
        return Splits(capabilities.splits)

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a kernel that gives partials, and a row that reads two leaves."""
        return cannot_split(call, self.splits)

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield splits of one, two and eight leaves, and those of one leaf in another order of arrival."""
        for leaves in SIZES:
            yield of_split(call, Split(rows=leaves * TKA1_REDUCTION.leaf))
        yield of_split(call, Split(rows=TKA1_REDUCTION.leaf, arrival=seed + 1))

    def broken(self) -> Provider:
        """Return a kernel whose partials have an LSE in base 2, merged as nats."""
        return BaseTwoPartials()


def of_split(call: AttentionCall, split: Split) -> Variant:
    """Return the call as a job."""
    return Variant(str(split), Launch((call,), Execution(split=split)))


def cannot_split(call: AttentionCall, splits: bool) -> str | None:
    """Return why the KV of a call cannot be split on a kernel, in one clause, or None."""
    if not splits:
        return "the kernel gives no partials"
    if any(_leaves(call, t) > 1 for t in range(call.num_rows)):
        return None
    return f"no row of the call reads keys in two leaves of {TKA1_REDUCTION.leaf} rows"


def _leaves(call: AttentionCall, t: int) -> int:
    """In how many leaves a row reads keys."""
    count = 0
    for part in call.selection.families.values():
        if isinstance(part, Ranges):
            low, high = int(part.lo[t]), int(part.hi[t])
            count += 0 if high <= low else (high - 1) // TKA1_REDUCTION.leaf - low // TKA1_REDUCTION.leaf + 1
        else:
            count += len(set((part.row(t) // TKA1_REDUCTION.leaf).tolist()))
    return count
