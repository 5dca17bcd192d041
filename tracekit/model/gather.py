"""A call as blocks of dense float64 arrays: what a reference needs to compute it, and nothing about how.

A block holds some query rows of one request, the union of the KV rows that they read, and a mask that
says which row reads which. The order of the keys is lost on purpose: a float64 reference reads a set.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.model.bits import Array
from tracekit.model.call import AttentionCall
from tracekit.model.kv import KVFamily, KVRows
from tracekit.model.selection import Lists, Ranges

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Block:
    """Some query rows of one request over the KV rows that they read.

    Args:
        rows: int64 `[R]`, indices of the query rows in the call.
        q: `[R, H, D]`.
        keys: `[N, Hkv, D]`, over all families.
        values: `[N, Hkv, Dv]`.
        mask: bool `[R, N]`, whether a row reads a key.
    """

    rows: npt.NDArray[np.int64]
    q: Float64
    keys: Float64
    values: Float64
    mask: npt.NDArray[np.bool_]


def blocks(call: AttentionCall, *, max_rows: int | None = None, max_scores: int = 1 << 21) -> Iterator[Block]:
    """Yield the call block by block; every query row is in exactly one block.

    Args:
        call: the call.
        max_rows: most query rows of a block.
        max_scores: about how many scores `R * H * N` a block may have, which bounds the memory.
    """
    for index, key in enumerate(call.rows.requests):
        rows = np.flatnonzero(call.rows.request == index).astype(np.int64)
        held = sum(part.count for part in call.kv[key].values())
        size = max(1, max_scores // max(1, held * call.num_heads))
        size = size if max_rows is None else min(size, max_rows)
        for start in range(0, rows.size, size):
            yield _block(call, call.kv[key], rows[start : start + size])


def _block(call: AttentionCall, kv: Mapping[KVFamily, KVRows], rows: Array) -> Block:
    keys, values, masks = [], [], []
    for family, part in call.selection.families.items():
        ids, mask = _union(part, rows)
        held = kv[family]
        keys.append(held.keys.part(ids - held.first).to_float64())
        values.append(keys[-1] if held.values is None else held.values.part(ids - held.first).to_float64())
        masks.append(mask)
    return Block(
        rows, call.q.part(rows).to_float64(), np.concatenate(keys), np.concatenate(values), np.hstack(masks)
    )


def _union(part: Ranges | Lists, rows: Array) -> tuple[Array, Array]:
    """The KV rows that some query rows read, ascending, and `[R, N]` which reads which."""
    if isinstance(part, Ranges):
        lo, hi = part.lo[rows], np.maximum(part.hi[rows], part.lo[rows])
        some = hi > lo
        first, end = (int(lo[some].min()), int(hi[some].max())) if some.any() else (0, 0)
        ids = np.arange(first, end, dtype=np.int64)
        return ids, (ids >= lo[:, None]) & (ids < hi[:, None])
    lists = [part.row(int(t)) for t in rows]
    ids = np.unique(np.concatenate([np.zeros(0, np.int64), *lists]))
    mask = np.zeros((len(lists), ids.size), np.bool_)
    owner = np.repeat(np.arange(len(lists)), [len(one) for one in lists])
    mask[owner, np.searchsorted(ids, np.concatenate([np.zeros(0, np.int64), *lists]))] = True
    return ids, mask
