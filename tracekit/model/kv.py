"""Canonical KV: the rows that a kernel read, by logical row index, free of pages, slots and batches."""

from dataclasses import dataclass
from enum import StrEnum

from tracekit.errors import InvalidCall
from tracekit.model.bits import Bits


class KVFamily(StrEnum):
    """State families of attention KV.

    `dense` is ordinary causal KV; `recent` the sliding window beside compressed rows; `c4` and `c128`
    the compressed rows of DeepSeek-V4; `index` the keys of its indexer.
    """

    DENSE = "dense"
    RECENT = "recent"
    C4 = "c4"
    C128 = "c128"
    INDEX = "index"

    ratio: int
    """Tokens of one row; row r is complete, and visible, from position `(r + 1) * ratio - 1` on."""

    def __init__(self, name: str) -> None:
        self.ratio = {"c4": 4, "c128": 128}.get(name, 1)

    __hash__ = str.__hash__
    """That of an enumeration is written in Python, and each look into a table by family asks for it."""

    def visible(self, position: int) -> int:
        """Return how many rows exist for a query at `position`: rows `0 .. visible - 1` are causal."""
        return (position + 1) // self.ratio


@dataclass(frozen=True, eq=False)
class KVRows:
    """Rows `first .. first + N - 1` of one request, layer and family.

    Args:
        keys: `[N, Hkv, D]`.
        values: `[N, Hkv, Dv]`, or None where keys and values are one tensor (MQA of DeepSeek-V4).
        first: logical index of row 0; above 0 where a sliding window dropped the start.
        generation: write epoch of the rows.

    Raises:
        InvalidCall: `M-KV-SHAPE`, `M-KV-DTYPE`, `M-KV-FIRST`.
    """

    keys: Bits
    values: Bits | None
    first: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        if len(self.keys.shape) != 3 or self.keys.shape[1] < 1 or self.keys.shape[2] < 1:
            raise InvalidCall(f"keys are [N, Hkv, D], not {list(self.keys.shape)}.", rule="M-KV-SHAPE")
        if self.values is not None:
            if len(self.values.shape) != 3 or self.values.shape[:2] != self.keys.shape[:2]:
                raise InvalidCall(
                    f"values are [N, Hkv, Dv] with the N and Hkv of the keys {list(self.keys.shape)}, "
                    f"not {list(self.values.shape)}.",
                    rule="M-KV-SHAPE",
                )
            if self.values.dtype != self.keys.dtype:
                raise InvalidCall(
                    f"keys are {self.keys.dtype} and values {self.values.dtype}; one dtype is needed.",
                    rule="M-KV-DTYPE",
                )
        if self.first < 0 or self.generation < 0:
            raise InvalidCall("first row and generation are at least 0.", rule="M-KV-FIRST")

    @property
    def count(self) -> int:
        """N, the rows held."""
        return self.keys.shape[0]

    @property
    def end(self) -> int:
        """The logical index after the last row held."""
        return self.first + self.count

    @property
    def shared(self) -> bool:
        """Whether keys and values are one tensor."""
        return self.values is None

    @property
    def value_bits(self) -> Bits:
        """The values, which are the keys where the two are shared."""
        return self.keys if self.values is None else self.values

    def until(self, end: int) -> "KVRows":
        """Return only the rows below logical index `end`."""
        return self.window(self.first, end)

    def window(self, first: int, end: int) -> "KVRows":
        """Return only the rows with logical index in `[first, end)`; clamped to what is held."""
        lo = min(max(first, self.first), self.end)
        hi = min(max(end, lo), self.end)
        part = slice(lo - self.first, hi - self.first)
        values = None if self.values is None else self.values.part(part)
        return KVRows(self.keys.part(part), values, lo, self.generation)
