"""A padded batch `[B, S]` over a cache `[B, T]`: which slots are rows, and what the mask lets each row read.

Padding has no identity. A row is its place among the real tokens of its own sequence, so a left-padded
sequence and the same sequence alone have the same rows, the same KV and the same selection.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall
from tracekit.model import Array, Lists, Ranges


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """One launch over B sequences.

    Args:
        real: bool `[B, N]`, every token slot so far, this launch's S included: False for padding.
        queries: S, the last S of the N slots ask.
        keys: T, the last T of the N slots are held; less than N where a sliding window dropped the start.

    Raises:
        InvalidCall: `C-PADDED` when the lengths do not fit.
    """

    real: npt.NDArray[np.bool_]
    queries: int
    keys: int

    def __post_init__(self) -> None:
        slots = self.real.shape[-1]
        if self.real.ndim != 2 or not 0 < self.queries <= slots or not 0 < self.keys <= slots:
            raise InvalidCall(
                f"{self.queries} query and {self.keys} key slots do not fit token slots "
                f"{list(self.real.shape)}; the attention mask must cover past and new tokens.",
                rule="C-PADDED",
            )

    @cached_property
    def full(self) -> bool:
        """Whether no slot is padding: then the rest needs no look at each."""
        return bool(self.real.all())

    @cached_property
    def _rank(self) -> npt.NDArray[np.int64]:
        """Place of each slot among the real ones of its sequence, `[B, N]`."""
        return np.cumsum(self.real, axis=1, dtype=np.int64) - 1

    @cached_property
    def row_slots(self) -> npt.NDArray[np.int64]:
        """The slot `b * S + s` of each row, int64 `[rows]`; sequence by sequence, ascending."""
        return np.flatnonzero(self.real[:, -self.queries :])

    @cached_property
    def present(self) -> tuple[int, ...]:
        """The batch places that have rows, ascending."""
        if self.full:
            return tuple(range(len(self.real)))
        return tuple(np.flatnonzero(self.real[:, -self.queries :].any(axis=1)).tolist())

    @cached_property
    def sequence(self) -> npt.NDArray[np.int32]:
        """The batch place b of each row, int32 `[rows]`."""
        return (self.row_slots // self.queries).astype(np.int32)

    @cached_property
    def positions(self) -> npt.NDArray[np.int64]:
        """The position of each row in its own sequence, padding not counted."""
        return self._rank[:, -self.queries :].reshape(-1)[self.row_slots]

    @property
    def key_rows(self) -> npt.NDArray[np.int64]:
        """The logical row in each key slot, int64 `[B, T]`; says nothing where a slot holds none."""
        return self._rank[:, -self.keys :]

    @property
    def real_keys(self) -> npt.NDArray[np.bool_]:
        """Which key slots hold a row, bool `[B, T]`."""
        return self.real[:, -self.keys :]

    def key_slots(self, b: int) -> slice | Array:
        """The key slots of sequence b that hold rows: a slice where they are contiguous."""
        return self._key_slots[b]

    @cached_property
    def _key_slots(self) -> list[slice | Array]:
        if self.full:
            return [slice(0, self.keys)] * len(self.real)
        return [_contiguous(np.flatnonzero(real)) for real in self.real_keys]

    def first_key(self, b: int) -> int:
        """The logical index of the first row held of sequence b."""
        return self._first_keys[b]

    @cached_property
    def _first_keys(self) -> list[int]:
        if self.full:
            return [self.real.shape[1] - self.keys] * len(self.real)
        dropped: list[int] = self.real[:, : self.real.shape[1] - self.keys].sum(axis=1).tolist()
        return dropped

    def causal(self) -> npt.NDArray[np.bool_]:
        """What a launch without a mask and with `is_causal` reads: slot s reads key slots 0 .. s."""
        shape = (self.real.shape[0], self.queries, self.keys)
        return np.broadcast_to(np.tri(self.queries, self.keys, dtype=np.bool_), shape)

    def everything(self) -> npt.NDArray[np.bool_]:
        """What a launch without a mask and without `is_causal` reads."""
        return np.ones((self.real.shape[0], self.queries, self.keys), np.bool_)

    def selection(self, visible: npt.NDArray[np.bool_]) -> Ranges | Lists:
        """Return the logical rows that each row reads, from what the mask shows.

        Args:
            visible: bool `[B, S, T]`, the key slots that each query slot reads.

        Raises:
            InvalidCall: `C-MASK-PADDING` when a row reads a padding slot.
        """
        seen = visible.reshape(-1, self.keys)[self.row_slots]
        owner = self.sequence
        if (seen & ~self.real_keys[owner]).any():
            raise InvalidCall(
                "the mask lets a row read a padding slot of its sequence; pass the attention_mask that says "
                "which tokens are padding.",
                rule="C-MASK-PADDING",
            )
        return as_selection(seen, self.key_rows[owner])


def _contiguous(slots: Array) -> slice | Array:
    """Some ascending slots as a slice, where they follow one another."""
    if slots.size and slots[-1] - slots[0] + 1 == slots.size:
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots


def as_selection(seen: npt.NDArray[np.bool_], ids: Array) -> Ranges | Lists:
    """Return what rows read: ranges where every row reads consecutive ids, else lists, in order of the slots.

    Args:
        seen: bool `[R, N]`, which slots each row reads.
        ids: int64 `[R, N]`, the logical row in each slot; rises along a row.
    """
    if not seen.shape[1]:
        return Ranges(np.zeros(seen.shape[0], np.int64), np.zeros(seen.shape[0], np.int64))
    counts = seen.sum(1)
    row = np.arange(seen.shape[0])
    lowest = ids[row, seen.argmax(1)]
    highest = ids[row, seen.shape[1] - 1 - seen[:, ::-1].argmax(1)]
    some = counts > 0
    lo, hi = np.where(some, lowest, 0), np.where(some, highest + 1, 0)
    if (hi - lo == counts).all():
        return Ranges(lo, hi)
    return Lists(ids[seen], np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
