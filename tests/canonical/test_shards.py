"""Head padding, tensor-parallel heads and context-parallel blocks, both ways."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.canonical.layouts import refused
from tracekit.canonical.heads import HeadShards, drop_heads, pad_heads
from tracekit.canonical.shards import (
    SequenceShard,
    check_cover,
    contiguous,
    shard_rows,
    unshard_rows,
    zigzag,
)


def numbered(rows: int, heads: int) -> np.ndarray:
    return np.arange(rows * heads * 2, dtype=np.uint16).reshape(rows, heads, 2)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 6))
def test_padded_heads_are_dropped_again(heads, padding):
    array = numbered(3, heads)
    padded = pad_heads(array, heads + padding, fill=0x7FC1)
    assert np.array_equal(drop_heads(padded, heads), array)
    assert (padded[:, heads:] == 0x7FC1).all()


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 8]), st.integers(0, 3))
def test_heads_are_shared_and_joined_and_a_rank_can_attend_alone(kv_heads, group, ranks, rows):
    heads = kv_heads * group
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        assert refused(lambda: HeadShards(heads, kv_heads, ranks)) == "C-TP-UNEVEN"
        return
    shards = HeadShards(heads, kv_heads, ranks)
    q, k = numbered(rows, heads), numbered(rows, kv_heads)
    assert np.array_equal(shards.unshard_query(shards.shard_query(q)), q)
    assert np.array_equal(shards.unshard_kv(shards.shard_kv(k)), k)
    for rank in range(ranks):
        mine, keys = range(heads)[shards.query_heads(rank)], range(kv_heads)[shards.key_heads(rank)]
        local = len(mine) // len(keys)
        assert [keys[i // local] for i in range(len(mine))] == [h // group for h in mine]


def test_qwen3_heads_over_two_four_and_sixteen_ranks():
    """32 query and 8 KV heads: 16/4, 8/2 (the case of RL-Kernel#388), and KV heads held twice."""
    sizes = {ranks: HeadShards(32, 8, ranks) for ranks in (2, 4, 16)}
    assert [(s.query_heads(1), s.key_heads(1)) for s in sizes.values()] == [
        (slice(16, 32), slice(4, 8)),
        (slice(8, 16), slice(2, 4)),
        (slice(2, 4), slice(0, 1)),
    ]


def test_copies_of_a_kv_head_that_differ_in_one_bit_are_refused():
    shards = HeadShards(4, 1, 2)
    parts = [part.copy() for part in shards.shard_kv(numbered(3, 1))]
    parts[1][2, 0, 1] ^= 1
    assert refused(lambda: shards.unshard_kv(parts)) == "C-TP-COPIES"


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 5), st.booleans())
def test_a_sequence_is_sharded_and_comes_back(ranks, size, folded):
    length = size * ranks * (2 if folded else 1)
    shards = (zigzag if folded else contiguous)(length, ranks)
    array = numbered(length, 2)
    parts = shard_rows(array, shards)
    assert np.array_equal(unshard_rows(parts, shards, length), array)
    assert {len(part) for part in parts} == {length // ranks}


def test_zigzag_gives_each_rank_an_early_and_a_late_block():
    first, second = zigzag(12, 2)
    assert first.positions.tolist() == [0, 1, 2, 9, 10, 11]
    assert second.positions.tolist() == [3, 4, 5, 6, 7, 8]
    assert first.block_indices.tolist() == [0, 3]
    assert first.local_offsets.tolist() == [0, 3]


def test_blocks_that_are_not_neighbours_and_not_equal():
    """A rank may own blocks 0 and 3 of a sequence with other lengths."""
    shards = [SequenceShard([0, 3], [0, 7], [0, 2], 3), SequenceShard([1, 2], [2, 4], [0, 2], 5)]
    array = numbered(8, 1)
    parts = shard_rows(array, shards)
    assert parts[0][:, 0, 0].tolist() == [0, 2, 14]
    assert np.array_equal(unshard_rows(parts, shards, 8), array)


def shard(blocks, starts, offsets, count):
    return SequenceShard(np.array(blocks), np.array(starts), np.array(offsets), count)


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("C-HEADS", lambda: drop_heads(numbered(2, 3), 4)),
        ("C-HEADS", lambda: pad_heads(numbered(2, 3), 2)),
        ("C-HEADS", lambda: HeadShards(4, 2, 2).shard_query(numbered(2, 2))),
        ("C-TP-UNEVEN", lambda: HeadShards(32, 8, 3)),
        ("C-TP-UNEVEN", lambda: HeadShards(12, 6, 4)),
        ("C-TP-PARTS", lambda: HeadShards(4, 2, 2).unshard_kv([numbered(2, 1)])),
        ("C-TP-PARTS", lambda: HeadShards(4, 2, 2).unshard_kv([numbered(2, 1), numbered(3, 1)])),
        ("C-TP-PARTS", lambda: HeadShards(4, 2, 2).unshard_query([numbered(2, 1)] * 2)),
        ("C-TP-PARTS", lambda: HeadShards(4, 2, 2).key_heads(2)),
        ("C-CP-UNSORTED", lambda: shard([1, 0], [0, 2], [0, 2], 4)),
        ("C-CP-UNSORTED", lambda: shard([0, 1], [2, 0], [0, 2], 4)),
        ("C-CP-UNSORTED", lambda: shard([0, 1], [0, 2], [0, 0], 4)),
        ("C-CP-OVERLAP", lambda: shard([0, 1], [0, 2], [0, 3], 4)),
        ("C-CP-SHAPE", lambda: shard([0], [0, 2], [0, 2], 4)),
        ("C-CP-SHAPE", lambda: shard([0, 1], [0, 2], [1, 2], 4)),
        ("C-CP-SHAPE", lambda: shard([0, 1], [0, 2], [0, 4], 4)),
        ("C-CP-OVERLAP", lambda: check_cover([shard([0], [0], [0], 3), shard([1], [2], [0], 2)], 4)),
        ("C-CP-GAP", lambda: check_cover([shard([0], [0], [0], 1), shard([1], [2], [0], 2)], 4)),
        ("C-CP-GAP", lambda: check_cover([shard([0], [0], [0], 3)], 4)),
        ("C-CP-LENGTH", lambda: check_cover([shard([0], [0], [0], 5)], 4)),
        ("C-CP-LENGTH", lambda: contiguous(5, 2)),
        ("C-CP-LENGTH", lambda: zigzag(6, 2)),
        ("C-CP-UNSORTED", lambda: check_cover([shard([1], [0], [0], 2), shard([0], [2], [0], 2)], 4)),
        ("C-CP-SHAPE", lambda: unshard_rows([numbered(1, 1)], contiguous(4, 1), 4)),
        ("C-CP-SHAPE", lambda: unshard_rows([numbered(2, 1), numbered(2, 2)], contiguous(4, 2), 4)),
    ],
)
def test_shards_that_cannot_be_right_are_refused(code, call):
    assert refused(call) == code
