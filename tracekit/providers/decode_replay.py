"""A decode step computed again block by block, from what the engine's tables say (B17).

One FP32 `(O, LSE)` a logical block, merged by the index of the block: pages, their order and their owners are
no part of the answer, so the same plan over the flat logical sequence gives the same bits.
"""

from collections.abc import Callable

import numpy as np

from tracekit.canonical.decode_cache import DecodeCache
from tracekit.model import Array, DType, LseBase, PartialState, ReductionSpec, Tree
from tracekit.providers import tka1
from tracekit.providers.partials import merge_lse_blocks, to_lse
from tracekit.providers.tka1 import arithmetic as ar

Blocks = dict[int, tuple[ar.F32, ar.F32]]
"""Block index -> binary32 O `[1, H, Dv]` and LSE `[1, H]`."""


def block_reduction(page: int, tree: Tree = Tree.LEFT_FOLD) -> ReductionSpec:
    """Return the reduction over the pages of a cache."""
    return ReductionSpec(tree, page, PartialState.OUT_LSE, LseBase.NATURAL)


def replay_decode(
    q: Array, cache: DecodeCache, sequence: int, spec: ReductionSpec, scale_bits: int, dtype: DType
) -> tka1.Outputs:
    """Return the answer of one query from its pages.

    Args:
        q: bits `[H, D]`.
        cache: the cache, checked when it was made.
        sequence: whose query it is.
        spec: how blocks merge; its leaf is the page.
        scale_bits: binary32 bits of the factor of a score.
        dtype: of q, keys, values and O.
    """
    return _answer(
        q, len(cache.pages_of(sequence)), lambda n: cache.block(sequence, n), spec, scale_bits, dtype
    )


def flat_decode(
    q: Array, keys: Array, values: Array, spec: ReductionSpec, scale_bits: int, dtype: DType
) -> tka1.Outputs:
    """Return the answer of one query over flat rows `[n, Hkv, D]`, in the same blocks."""

    def block(number: int) -> tuple[Array, Array]:
        rows = slice(number * spec.leaf, (number + 1) * spec.leaf)
        return keys[rows], values[rows]

    return _answer(q, -(-len(keys) // spec.leaf), block, spec, scale_bits, dtype)


def block_states(
    q: Array, count: int, block: Callable[[int], tuple[Array, Array]], scale_bits: int, dtype: DType
) -> Blocks:
    """Return the FP32 state of each block: what context-parallel ranks would exchange."""
    states = {}
    for number in range(count):
        keys, values = block(number)
        seen = tka1.Ranges(np.zeros(1, np.int64), np.array([len(keys)], np.int64))
        rows = tuple(np.ascontiguousarray(x) for x in (keys, values))
        family = tka1.FamilyInput((rows[0],), (rows[1],), (0,), seen)
        inputs = tka1.Inputs(q[None], np.zeros(1, np.int32), (family,), None, scale_bits, dtype)
        states[number] = to_lse(tka1.partials(inputs))
    return states


def _answer(
    q: Array,
    count: int,
    block: Callable[[int], tuple[Array, Array]],
    spec: ReductionSpec,
    scale_bits: int,
    dtype: DType,
) -> tka1.Outputs:
    return merge_lse_blocks(block_states(q, count, block, scale_bits, dtype), spec, None, dtype)
