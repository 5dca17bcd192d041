"""Context parallelism: which tokens of a sequence a rank holds, and the whole sequence from all ranks.

A rank holds blocks of consecutive tokens. Block i has a global index, the token it starts at, and the offset
of its first row in the rank's own array. Contiguous: rank r of R holds block r of R. Zigzag (the balanced
layout of Megatron's context parallelism and of ring attention): the sequence is cut in 2R blocks and rank r
holds blocks r and 2R - 1 - r, so that causal work is even.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.canonical.refuse import Int64, first_true, integers, refuse
from tracekit.model import Array


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """The blocks of one rank, in the order of its own array.

    Args:
        block_indices: int64 `[B]`, global index of each block, ascending.
        token_starts: int64 `[B]`, first token of each block.
        local_offsets: int64 `[B]`, first row of each block in the rank's array, from 0.
        rows: rows of the rank's array.

    Raises:
        InvalidCall: `C-CP-SHAPE` columns of several lengths; `C-CP-UNSORTED` indices, tokens or offsets that
            do not rise; `C-CP-OVERLAP` a block that runs into the next.
    """

    block_indices: Int64
    token_starts: Int64
    local_offsets: Int64
    rows: int

    def __post_init__(self) -> None:
        columns = ("block_indices", "token_starts", "local_offsets")
        for name in columns:
            object.__setattr__(self, name, integers(getattr(self, name), name))
        if len({getattr(self, name).size for name in columns}) != 1 or (
            self.rows and not self.token_starts.size
        ):
            refuse("C-CP-SHAPE", "each block has an index, a first token and an offset.")
        for name in columns:
            column = getattr(self, name)
            if column.size and (column[0] < 0 or (np.diff(column) <= 0).any()):
                refuse("C-CP-UNSORTED", f"{name} {column.tolist()} do not rise.", column=name)
        if self.token_starts.size and (self.local_offsets[0] or self.lengths[-1] < 1):
            refuse(
                "C-CP-SHAPE", f"offsets {self.local_offsets.tolist()} of {self.rows} rows.", rows=self.rows
            )
        at = first_true(self.token_starts[:-1] + self.lengths[:-1] > self.token_starts[1:])
        if at is not None:
            refuse(
                "C-CP-OVERLAP",
                f"block {int(self.block_indices[at])} runs to token "
                f"{int(self.token_starts[at] + self.lengths[at])}, past the start of the next.",
                block=int(self.block_indices[at]),
            )

    @property
    def lengths(self) -> Int64:
        """Tokens of each block."""
        return np.diff(self.local_offsets, append=self.rows)

    @property
    def positions(self) -> Int64:
        """The token position of each row of the rank, int64 `[rows]`."""
        within = np.arange(self.rows, dtype=np.int64) - np.repeat(self.local_offsets, self.lengths)
        return np.repeat(self.token_starts, self.lengths) + within


def contiguous(length: int, ranks: int) -> list[SequenceShard]:
    """Return the shards of a sequence cut into `ranks` equal blocks.

    Raises:
        InvalidCall: `C-CP-LENGTH` when the length does not divide: engines pad to a multiple first.
    """
    return [_shard([rank], _size(length, ranks)) for rank in range(ranks)]


def zigzag(length: int, ranks: int) -> list[SequenceShard]:
    """Return the shards of a sequence cut into `2 * ranks` equal blocks, rank r with r and `2 ranks - 1 - r`.

    Raises:
        InvalidCall: `C-CP-LENGTH`.
    """
    size = _size(length, 2 * ranks)
    return [_shard([rank, 2 * ranks - 1 - rank], size) for rank in range(ranks)]


def shard_rows(array: Array, shards: Sequence[SequenceShard]) -> list[Array]:
    """Return `[length, ...]` as one array `[rows, ...]` a rank.

    Raises:
        InvalidCall: as `check_cover`.
    """
    check_cover(shards, len(array))
    return [array[shard.positions] for shard in shards]


def unshard_rows(parts: Sequence[Array], shards: Sequence[SequenceShard], length: int) -> Array:
    """Return `[length, ...]` of the ranks' rows, in token order; the inverse of `shard_rows`.

    Raises:
        InvalidCall: as `check_cover`; `C-CP-SHAPE` when parts and shards do not fit.
    """
    check_cover(shards, length)
    found, wanted = [len(part) for part in parts], [shard.rows for shard in shards]
    if found != wanted or not found:
        refuse("C-CP-SHAPE", f"parts of {found} rows for shards of {wanted}.")
    if len({(part.dtype, part.shape[1:]) for part in parts}) > 1:
        refuse("C-CP-SHAPE", "the parts of a sequence have one dtype and one shape of row.")
    whole = np.empty((length, *parts[0].shape[1:]), parts[0].dtype)
    for part, shard in zip(parts, shards, strict=True):
        whole[shard.positions] = part
    return whole


def check_cover(shards: Sequence[SequenceShard], length: int) -> None:
    """Refuse shards that do not hold every token of a sequence exactly once.

    Raises:
        InvalidCall: `C-CP-LENGTH` tokens past the sequence; `C-CP-OVERLAP` a token twice; `C-CP-GAP` a token
            that no rank holds; `C-CP-UNSORTED` block indices that contradict the order of the tokens.
    """
    held = np.zeros(length, np.int64)
    for rank, shard in enumerate(shards):
        at = shard.positions
        if at.size and at[-1] >= length:
            refuse(
                "C-CP-LENGTH", f"rank {rank} holds token {int(at[-1])} of {length}.", rank=rank, length=length
            )
        held[at] += 1
    for rule, bad, why in (("C-CP-OVERLAP", held > 1, "twice"), ("C-CP-GAP", held < 1, "by no rank")):
        token = first_true(bad)
        if token is not None:
            refuse(rule, f"token {token} of {length} is held {why}.", token=token, length=length)
    indices = np.concatenate([np.zeros(0, np.int64), *(shard.block_indices for shard in shards)])
    starts = np.concatenate([np.zeros(0, np.int64), *(shard.token_starts for shard in shards)])
    order = np.argsort(starts)
    if (np.diff(indices[order]) <= 0).any():
        refuse(
            "C-CP-UNSORTED",
            f"blocks {indices[order].tolist()} start at tokens {starts[order].tolist()}: the global index is "
            "the order of the sequence.",
        )


def _size(length: int, blocks: int) -> int:
    if blocks < 1 or length < 0 or length % blocks:
        refuse(
            "C-CP-LENGTH",
            f"{length} tokens do not divide into {blocks} blocks.",
            length=length,
            blocks=blocks,
        )
    return length // blocks


def _shard(blocks: list[int], size: int) -> SequenceShard:
    index = np.array(blocks if size else [], np.int64)
    places = np.arange(index.size, dtype=np.int64)
    return SequenceShard(index, index * size, places * size, index.size * size)
