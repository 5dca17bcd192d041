"""Packed and padded batches: sequences one after the other in one array, and back to rows by request.

A launch over R sequences says where each starts with `cu_seqlens` `[R + 1]`. The m query rows of a sequence
are its last ones, so with n keys their positions are `n - m .. n - 1` (bottom-right alignment, the convention
of flash attention's variable-length kernels). Transformer Engine packs with padding between sequences
(`cu_seqlens_padded`); training frameworks also hold padded batches, `bshd` or `sbhd`.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tracekit.canonical.refuse import Int64, first_true, integers, refuse
from tracekit.model import Array


class BatchAxes(StrEnum):
    """Axes of an engine's array: t packed tokens, b sequence, s place, h head, d element."""

    THD = "thd"
    BSHD = "bshd"
    SBHD = "sbhd"


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """R sequences in one array.

    Args:
        starts: int64 `[R]`, the slot of the first row of each sequence.
        counts: int64 `[R]`, rows of each sequence, padding left out.
        slots: slots of the array.

    Raises:
        InvalidCall: `C-CU-OVERLAP` when sequences are not one after the other; `C-CU-TOTAL` when they do not
            lie in the array.
    """

    starts: Int64
    counts: Int64
    slots: int

    def __post_init__(self) -> None:
        for name in ("starts", "counts"):
            object.__setattr__(self, name, integers(getattr(self, name), name))
        if self.starts.shape != self.counts.shape:
            refuse("C-CU-OVERLAP", f"{self.starts.size} starts for {self.counts.size} sequences.")
        ends = self.starts + self.counts
        at = first_true((self.counts < 0) | (self.starts < np.concatenate([[0], ends[:-1]])))
        if at is not None:
            refuse(
                "C-CU-OVERLAP",
                f"sequence {at} holds slots [{int(self.starts[at])}, {int(ends[at])}), which do not follow "
                "the sequence before.",
                sequence=at,
            )
        if ends.size and ends[-1] > self.slots:
            refuse("C-CU-TOTAL", f"sequences end at slot {int(ends[-1])} of {self.slots}.", slots=self.slots)

    @classmethod
    def of_cu_seqlens(
        cls, cu_seqlens: npt.ArrayLike, slots: int, padded: npt.ArrayLike | None = None
    ) -> "PackedBatch":
        """Build from cumulative lengths.

        Args:
            cu_seqlens: `[R + 1]`, from 0; differences are the lengths.
            slots: slots of the array; may be more than the last entry (a launch padded for a graph).
            padded: `[R + 1]`, where sequence i starts at `padded[i]`, or None for no padding between.

        Raises:
            InvalidCall: `C-CU-START` when one does not begin at 0; `C-CU-OVERLAP`, `C-CU-TOTAL`.
        """
        cu = integers(cu_seqlens, "cu_seqlens")
        starts = cu if padded is None else integers(padded, "cu_seqlens_padded")
        if cu.size < 1 or starts.shape != cu.shape or cu[0] or starts[0]:
            refuse(
                "C-CU-START",
                f"cumulative lengths begin at 0 and have one shape, not {cu[:1].tolist()} {list(cu.shape)} "
                f"and {starts[:1].tolist()} {list(starts.shape)}.",
            )
        if starts[-1] > slots:
            refuse("C-CU-TOTAL", f"padded sequences end at slot {int(starts[-1])} of {slots}.", slots=slots)
        batch = cls(starts[:-1], np.diff(cu), slots)
        over = first_true(batch.starts + batch.counts > starts[1:])
        if over is not None:
            refuse("C-CU-OVERLAP", f"sequence {over} is longer than its padded place.", sequence=over)
        return batch

    @classmethod
    def of_padded(cls, lengths: npt.ArrayLike, places: int) -> "PackedBatch":
        """Build from a right-padded batch of R sequences with `places` slots each, flattened `b * S + s`.

        Left padding and masks are `PaddedBatch`'s.

        Raises:
            InvalidCall: `C-CU-OVERLAP`, `C-CU-TOTAL` when a sequence is longer than its place.
        """
        counts = integers(lengths, "lengths")
        return cls(np.arange(counts.size, dtype=np.int64) * places, counts, counts.size * places)

    @property
    def request(self) -> npt.NDArray[np.int32]:
        """The sequence of each row, int32 `[T]`; sequence by sequence, ascending."""
        return np.repeat(np.arange(self.counts.size, dtype=np.int32), self.counts)

    @property
    def row_slots(self) -> Int64:
        """The slot of each row, int64 `[T]`."""
        return np.repeat(self.starts, self.counts) + self._places

    @property
    def _places(self) -> Int64:
        """The place of each row in its sequence."""
        first = np.cumsum(self.counts) - self.counts
        return np.arange(int(self.counts.sum()), dtype=np.int64) - np.repeat(first, self.counts)

    def positions(self, kv_lengths: npt.ArrayLike | None = None) -> Int64:
        """Return the absolute position of each row, int64 `[T]`.

        Args:
            kv_lengths: `[R]`, n of each sequence with this launch's rows; None where all keys are new.

        Raises:
            InvalidCall: `C-CU-LENGTH` when a sequence has more query rows than keys.
        """
        lengths = self.counts if kv_lengths is None else integers(kv_lengths, "kv_lengths")
        if lengths.shape != self.counts.shape or (lengths < self.counts).any():
            refuse(
                "C-CU-LENGTH",
                f"query rows {self.counts.tolist()} are the last of {lengths.tolist()} keys.",
                rows=self.counts.tolist(),
                keys=lengths.tolist(),
            )
        return self._places + np.repeat(lengths - self.counts, self.counts)

    def unpack(self, array: Array) -> list[Array]:
        """Return the rows of each sequence, views of `[slots, ...]`.

        Raises:
            InvalidCall: `C-CU-TOTAL` when the array has another number of slots.
        """
        if array.shape[0] != self.slots:
            refuse("C-CU-TOTAL", f"an array of {array.shape[0]} slots, not {self.slots}.", slots=self.slots)
        return [array[s : s + n] for s, n in zip(self.starts.tolist(), self.counts.tolist(), strict=True)]

    def pack(self, sequences: list[Array], fill: int = 0) -> Array:
        """Return `[slots, ...]` with the rows of each sequence in place; the inverse of `unpack`.

        Args:
            sequences: one array `[n_i, ...]` a sequence.
            fill: the pattern of slots that hold no row.

        Raises:
            InvalidCall: `C-CU-LENGTH` when a sequence has another number of rows than its place.
        """
        if [len(rows) for rows in sequences] != self.counts.tolist() or not sequences:
            refuse("C-CU-LENGTH", f"{[len(r) for r in sequences]} rows for places of {self.counts.tolist()}.")
        array = np.full((self.slots, *sequences[0].shape[1:]), fill, sequences[0].dtype)
        array[self.row_slots] = np.concatenate(sequences)
        return array


def flat_slots(array: Array, axes: BatchAxes) -> Array:
    """Return `[slots, h, d]` of an engine's array, slot `b * S + s` whatever its axes.

    Raises:
        InvalidCall: `C-CU-AXES` when the array has another number of axes.
    """
    if array.ndim != len(axes):
        refuse("C-CU-AXES", f"{axes} has {len(axes)} axes, not {list(array.shape)}.", axes=axes.value)
    if axes is BatchAxes.THD:
        return array
    batch = array if axes is BatchAxes.BSHD else array.swapaxes(0, 1)
    return batch.reshape(-1, *batch.shape[2:])


def shaped(slots: Array, axes: BatchAxes, sequences: int) -> Array:
    """Return an engine's array from `[slots, h, d]`; the inverse of `flat_slots`.

    Raises:
        InvalidCall: `C-CU-AXES` when the slots do not divide over the sequences.
    """
    if axes is BatchAxes.THD:
        return slots
    if sequences < 1 or len(slots) % sequences:
        refuse("C-CU-AXES", f"{len(slots)} slots over {sequences} sequences.", axes=axes.value)
    batch = slots.reshape(sequences, len(slots) // sequences, *slots.shape[1:])
    return batch if axes is BatchAxes.BSHD else batch.swapaxes(0, 1)
