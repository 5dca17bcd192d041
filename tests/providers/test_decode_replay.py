"""A decode from pages has the bits of the same plan over flat rows; a wrong merge has not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.canonical.decode_cache import DecodeCache
from tracekit.model import Array, Bits, DType, Tree, scale_to_bits
from tracekit.providers import tka1
from tracekit.providers.decode_replay import block_reduction, block_states, flat_decode, replay_decode
from tracekit.providers.merge_oracle import torch_merge
from tracekit.providers.partials import merge_lse_blocks

HEADS, KV_HEADS, WIDTH = 4, 2, 16
SCALE = scale_to_bits(WIDTH**-0.5)


def numbers(seed: int, *shape: int) -> Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return Bits.from_float32(values, DType.BFLOAT16).data


def paged(keys: Array, values: Array, page: int, seed: int) -> DecodeCache:
    """One sequence on pages in no order, the rest of the cache NaN."""
    length, count = len(keys), -(-len(keys) // page)
    ids = np.random.default_rng(seed).permutation(count + 2)[:count]
    pools = [np.full((count + 2, page, KV_HEADS, WIDTH), 0x7FC1, np.uint16) for _ in range(2)]
    for n, page_id in enumerate(ids):
        for pool, rows in zip(pools, (keys, values), strict=True):
            part = rows[n * page : (n + 1) * page]
            pool[page_id, : len(part)] = part
    positions = np.arange(length)[None]
    return DecodeCache(*pools, ids[None], np.array([length]), np.array([length - 1]), positions, positions)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.sampled_from([1, 4, 16]), st.integers(0, 9), st.sampled_from(list(Tree)))
def test_pages_give_the_bits_of_flat_rows(length: int, page: int, seed: int, tree: Tree) -> None:
    q, keys, values = (numbers(seed, *s) for s in ((HEADS, WIDTH), *[(length, KV_HEADS, WIDTH)] * 2))
    spec = block_reduction(page, tree)

    ours = replay_decode(q, paged(keys, values, page, seed), 0, spec, SCALE, DType.BFLOAT16)
    flat = flat_decode(q, keys, values, spec, SCALE, DType.BFLOAT16)

    assert np.array_equal(ours.out, flat.out)
    assert np.array_equal(ours.lse, flat.lse)


def test_two_trees_are_two_reductions() -> None:
    """Seen before the downcast; in bfloat16 most of it is rounded away."""
    q, keys, values = (
        numbers(0, HEADS, WIDTH),
        numbers(1, 60, KV_HEADS, WIDTH),
        numbers(2, 60, KV_HEADS, WIDTH),
    )
    states = block_states(q, 60, lambda n: (keys[n : n + 1], values[n : n + 1]), SCALE, DType.BFLOAT16)

    left, aligned = (merge_lse_blocks(states, block_reduction(1, tree), None, DType.FLOAT32) for tree in Tree)

    assert not np.array_equal(left.out, aligned.out)


def test_one_row_of_one_page_is_read() -> None:
    q, keys, values = (
        numbers(0, HEADS, WIDTH),
        numbers(1, 20, KV_HEADS, WIDTH),
        numbers(2, 20, KV_HEADS, WIDTH),
    )
    other = keys.copy()
    other[13, 1, 3] ^= 0x8000
    spec = block_reduction(4)

    one, two = (flat_decode(q, k, values, spec, SCALE, DType.BFLOAT16) for k in (keys, other))

    assert not np.array_equal(one.lse, two.lse)


def test_torchs_merge_is_near_and_says_so() -> None:
    """An oracle: near in value, and no promise in bits."""
    q, keys, values = (
        numbers(0, HEADS, WIDTH),
        numbers(1, 60, KV_HEADS, WIDTH),
        numbers(2, 60, KV_HEADS, WIDTH),
    )
    states = block_states(
        q, 15, lambda n: (keys[4 * n : 4 * n + 4], values[4 * n : 4 * n + 4]), SCALE, DType.BFLOAT16
    )
    oracle = torch_merge([states[n] for n in sorted(states)])
    ours = flat_decode(q, keys, values, block_reduction(4), SCALE, DType.BFLOAT16)

    assert oracle.unavailable == ""
    assert oracle.lse is not None
    assert oracle.out is not None
    error = np.abs(oracle.lse - ours.lse.view(np.float32)).max()
    assert error < 64 * 2.0**-24 * np.abs(oracle.lse).max()
    assert np.abs(oracle.out - Bits(ours.out, DType.BFLOAT16).to_float32()).max() < 2.0**-7


def test_an_oracle_that_is_not_there_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    home = "torch.distributed.tensor.experimental._context_parallel._attention"
    monkeypatch.delattr(f"{home}._SDPAMerger")

    assert "not in this torch" in torch_merge([]).unavailable


def test_the_whole_row_by_tka1_itself_is_another_plan() -> None:
    """Blocks of a page normalise before they merge; TKA-1's leaves do not. The plan is part of the answer."""
    q, keys, values = (
        numbers(0, HEADS, WIDTH),
        numbers(1, 60, KV_HEADS, WIDTH),
        numbers(2, 60, KV_HEADS, WIDTH),
    )
    seen = tka1.Ranges(np.zeros(1, np.int64), np.array([60], np.int64))
    inputs = tka1.Inputs(
        q[None],
        np.zeros(1, np.int32),
        (tka1.FamilyInput((keys,), (values,), (0,), seen),),
        None,
        SCALE,
        DType.BFLOAT16,
    )
    whole = tka1.attention(inputs)
    blocks = flat_decode(q, keys, values, block_reduction(4), SCALE, DType.BFLOAT16)

    assert not np.array_equal(whole.lse, blocks.lse)
