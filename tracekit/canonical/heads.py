"""Heads: padding that an engine adds, and the share of a tensor-parallel rank.

Query head h reads key head `h // (H / Hkv)`, so a rank owns contiguous heads. With more ranks than KV heads a
KV head is held by several ranks, and their copies must be equal bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.canonical.refuse import refuse
from tracekit.model import Array


def drop_heads(array: Array, heads: int) -> Array:
    """Return the first `heads` heads of `[N, padded, ...]`, a view: engines pad behind.

    FlashMLA's callers pad to 64 or 128 query heads with a sink of -inf.

    Raises:
        InvalidCall: `C-HEADS` when there are fewer.
    """
    if array.ndim < 2 or not 0 < heads <= array.shape[1]:
        refuse("C-HEADS", f"{heads} heads of {list(array.shape)}.", heads=heads, shape=list(array.shape))
    return array[:, :heads]


def pad_heads(array: Array, heads: int, fill: int = 0) -> Array:
    """Return `[N, heads, ...]` with padding behind; the inverse of `drop_heads`.

    Raises:
        InvalidCall: `C-HEADS` when there are more heads already.
    """
    if array.ndim < 2 or heads < array.shape[1]:
        refuse("C-HEADS", f"{list(array.shape)} padded to {heads} heads.", heads=heads)
    padded = np.full((array.shape[0], heads, *array.shape[2:]), fill, array.dtype)
    padded[:, : array.shape[1]] = array
    return padded


@dataclass(frozen=True)
class HeadShards:
    """How heads are shared among the ranks of a tensor-parallel group.

    Args:
        heads: H, query heads of the model.
        kv_heads: Hkv of the model.
        ranks: tensor-parallel size.

    Raises:
        InvalidCall: `C-TP-UNEVEN` when heads do not divide over ranks, or KV heads neither divide over ranks
            nor ranks over KV heads.
    """

    heads: int
    kv_heads: int
    ranks: int

    def __post_init__(self) -> None:
        sizes = (self.heads, self.kv_heads, self.ranks)
        even = min(sizes) > 0 and not (self.heads % self.kv_heads or self.heads % self.ranks)
        if not even or (self.kv_heads % self.ranks and self.ranks % self.kv_heads):
            refuse(
                "C-TP-UNEVEN",
                f"{self.heads} query and {self.kv_heads} KV heads over {self.ranks} ranks.",
                heads=self.heads,
                kv_heads=self.kv_heads,
                ranks=self.ranks,
            )

    @property
    def copies(self) -> int:
        """Ranks that hold one KV head."""
        return max(1, self.ranks // self.kv_heads)

    def query_heads(self, rank: int) -> slice:
        """Return the query heads of a rank."""
        count = self.heads // self.ranks
        return slice(self._rank(rank) * count, (rank + 1) * count)

    def key_heads(self, rank: int) -> slice:
        """Return the KV heads of a rank; several ranks may have the same."""
        count = max(1, self.kv_heads // self.ranks)
        first = self._rank(rank) // self.copies * count
        return slice(first, first + count)

    def shard_query(self, array: Array) -> list[Array]:
        """Return `[N, H, ...]` as one view a rank."""
        self._need(array, self.heads)
        return [array[:, self.query_heads(rank)] for rank in range(self.ranks)]

    def shard_kv(self, array: Array) -> list[Array]:
        """Return `[N, Hkv, ...]` as one view a rank."""
        self._need(array, self.kv_heads)
        return [array[:, self.key_heads(rank)] for rank in range(self.ranks)]

    def unshard_query(self, parts: Sequence[Array]) -> Array:
        """Return `[N, H, ...]` of the ranks' parts, in rank order.

        Raises:
            InvalidCall: `C-TP-PARTS`.
        """
        self._need_parts(parts, self.heads // self.ranks)
        return np.concatenate(parts, axis=1)

    def unshard_kv(self, parts: Sequence[Array]) -> Array:
        """Return `[N, Hkv, ...]` of the ranks' parts, in rank order.

        Raises:
            InvalidCall: `C-TP-PARTS`; `C-TP-COPIES` when two ranks hold different bits of one KV head.
        """
        self._need_parts(parts, max(1, self.kv_heads // self.ranks))
        for rank, part in enumerate(parts):
            owner = rank - rank % self.copies
            if not np.array_equal(part, parts[owner]):
                refuse(
                    "C-TP-COPIES",
                    f"ranks {owner} and {rank} hold different bits of KV head {self.key_heads(rank).start}.",
                    ranks=[owner, rank],
                )
        return np.concatenate(parts[:: self.copies], axis=1)

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            refuse("C-TP-PARTS", f"rank {rank} of {self.ranks}.", rank=rank)
        return rank

    def _need(self, array: Array, heads: int) -> None:
        if array.ndim < 2 or array.shape[1] != heads:
            refuse("C-HEADS", f"[N, {heads}, ...] is needed, not {list(array.shape)}.", heads=heads)

    def _need_parts(self, parts: Sequence[Array], heads: int) -> None:
        first = parts[0] if parts else np.zeros(0, np.uint16)
        wanted = (first.dtype, first.shape[:1], heads, first.shape[2:])
        found = [(part.dtype, part.shape[:1], *part.shape[1:2], part.shape[2:]) for part in parts]
        if len(parts) != self.ranks or any(one != wanted for one in found):
            refuse(
                "C-TP-PARTS",
                f"{self.ranks} parts [N, {heads}, ...] of one dtype are needed, not "
                f"{[list(part.shape) for part in parts]}.",
                ranks=self.ranks,
            )
