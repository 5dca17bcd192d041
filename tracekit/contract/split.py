"""The split-KV request and what one owner's keys were really cut into (B10, B11, B16)."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from tracekit.contract.refuse import refuse
from tracekit.contract.topology import Range
from tracekit.model import Downcast, DType, MergeOrder


class SplitMode(StrEnum):
    """How a sequence of keys is cut."""

    DISABLED = "disabled"
    """Not at all: one range a block of an owner."""
    FIXED = "fixed"
    """At multiples of one size, counted from token 0."""
    AUTO = "auto"
    """As the kernel's heuristics choose, from shapes and devices: never strict."""


@dataclass(frozen=True)
class SplitRequest:
    """What was asked for.

    Args:
        mode: how to cut.
        fixed_split_size: keys of a split; with `fixed` only.
        strict: whether the caller wants a cut that the batch cannot change.

    Raises:
        BindingInvalid: `B-SPLIT-REQUEST` for a fixed split without a size, a size without a fixed split, and
            an automatic split that is called strict.
    """

    mode: SplitMode = SplitMode.DISABLED
    fixed_split_size: int | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        if (self.mode is SplitMode.FIXED) != (self.fixed_split_size is not None):
            refuse("B-SPLIT-REQUEST", "a fixed split has a size, and no other split has one.")
        if self.fixed_split_size is not None and self.fixed_split_size < 1:
            refuse("B-SPLIT-REQUEST", f"a split of {self.fixed_split_size} keys is none.")
        if self.strict and self.mode is SplitMode.AUTO:
            refuse("B-SPLIT-REQUEST", "an automatic split depends on the shape, so it is never strict.")


@dataclass(frozen=True)
class SplitExecution:
    """What ran on the keys of one owner, as one consumer merged them.

    Args:
        requested: what was asked for.
        actual_mode: what ran; None where the runtime does not say.
        actual_split_size: keys of a split that ran; with `fixed` only.
        boundaries: the token ranges that ran, ascending; several runs where an owner has several blocks.
        merge_order: by what the partial states were ordered.
        acc_dtype: dtype in which they merged.
        downcast_at: where FP32 became the output's dtype.
        backend: the kernel that ran.
        fallback: whether something else ran than what was asked for.
        fallback_reason: why; with a fallback only.

    Raises:
        BindingInvalid: `B-SPLIT-PLAN` for boundaries that are not ascending and disjoint, that do not fit
            the mode, or for a fallback without its reason.
    """

    requested: SplitRequest
    actual_mode: SplitMode | None
    actual_split_size: int | None
    boundaries: tuple[Range, ...]
    merge_order: MergeOrder = MergeOrder.GLOBAL_BLOCK_INDEX
    acc_dtype: DType = DType.FLOAT32
    downcast_at: Downcast = Downcast.FINAL_WRITE
    backend: str = ""
    fallback: bool = False
    fallback_reason: str | None = None

    def __post_init__(self) -> None:
        ends = [0]
        for start, stop in self.boundaries:
            if not ends[-1] <= start < stop:
                refuse("B-SPLIT-PLAN", f"boundaries {list(self.boundaries)} are not ascending and disjoint.")
            ends.append(stop)
        if self.actual_mode is None and (self.boundaries or self.actual_split_size is not None):
            refuse("B-SPLIT-PLAN", "a plan that nobody observed has no boundaries and no size.")
        if (self.actual_mode is SplitMode.FIXED) != (self.actual_split_size is not None):
            refuse("B-SPLIT-PLAN", "a fixed split that ran has a size, and no other one has.")
        if self.actual_split_size is not None:
            self._check_fixed(self.actual_split_size)
        if self.fallback != (self.fallback_reason is not None):
            refuse("B-SPLIT-PLAN", "a fallback has its reason, and nothing else has one.")

    def _check_fixed(self, size: int) -> None:
        """A fixed split cuts at multiples of its size; only the end of a run of ranges may be short."""
        if size < 1:
            refuse("B-SPLIT-PLAN", f"a split of {size} keys is none.")
        for (start, stop), following in pairwise([*self.boundaries, (-1, -1)]):
            whole = start % size == 0 and (stop == start + size or (stop < start + size))
            if not whole or (stop < start + size and following[0] == stop):
                refuse(
                    "B-SPLIT-PLAN",
                    f"keys {start} to {stop} are no split of {size}.",
                    boundaries=list(self.boundaries),
                )

    @property
    def differs_from_request(self) -> bool:
        """Whether anything but what was asked for ran, or nobody knows."""
        return (
            self.fallback
            or self.actual_mode is not self.requested.mode
            or self.actual_split_size != self.requested.fixed_split_size
        )


COMPARED = (
    "requested",
    "actual_mode",
    "actual_split_size",
    "boundaries",
    "merge_order",
    "acc_dtype",
    "downcast_at",
    "fallback",
)
"""Fields that decide bits: equal on all ranks and on both sides. The backend's name is recorded only."""


def differing(left: SplitExecution, right: SplitExecution) -> list[str]:
    """Return the fields in which two executions differ."""
    return [name for name in COMPARED if getattr(left, name) != getattr(right, name)]
