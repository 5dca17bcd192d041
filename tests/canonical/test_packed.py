"""Packed and padded batches, both ways."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.canonical.layouts import refused
from tracekit.canonical.packed import BatchAxes, PackedBatch, flat_slots, shaped
from tracekit.canonical.padded import PaddedBatch

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=5)


@settings(deadline=None)
@given(LENGTHS, st.lists(st.integers(0, 3), min_size=5, max_size=5), st.integers(0, 4))
def test_sequences_are_packed_and_unpacked(lengths, padding, tail):
    """With and without padding between them, and with a tail that only a captured graph needs."""
    places = [n + p for n, p in zip(lengths, padding, strict=False)]
    cu, padded = np.cumsum([0, *lengths]), np.cumsum([0, *places])
    numbers = np.random.default_rng(len(lengths))
    sequences = [numbers.integers(0, 2**16, (n, 2, 3), np.uint16) for n in lengths]
    for batch in (
        PackedBatch.of_cu_seqlens(cu, int(cu[-1]) + tail),
        PackedBatch.of_cu_seqlens(cu, int(padded[-1]) + tail, padded),
        PackedBatch.of_padded(lengths, 6),
    ):
        array = batch.pack(sequences, fill=0xA5A5)

        assert all(np.array_equal(a, b) for a, b in zip(batch.unpack(array), sequences, strict=True))
        assert np.array_equal(array[batch.row_slots], np.concatenate(sequences))
        assert batch.request.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
        assert batch.positions().tolist() == [p for n in lengths for p in range(n)]
        dead = np.ones(batch.slots, np.bool_)
        dead[batch.row_slots] = False
        assert (array[dead] == 0xA5A5).all()


def test_query_rows_are_the_last_rows_of_their_sequence():
    """One prefill chunk over a cached prefix, one decode row: bottom-right alignment."""
    batch = PackedBatch.of_cu_seqlens([0, 3, 4], 8)
    assert batch.positions([10, 301]).tolist() == [7, 8, 9, 300]


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 5))
def test_the_same_slots_whatever_the_axes(sequences, places):
    slots = np.arange(sequences * places * 6, dtype=np.uint16).reshape(-1, 2, 3)
    for axes in BatchAxes:
        array = shaped(slots, axes, sequences)
        assert (
            array.shape[: len(axes) - 2]
            == {
                BatchAxes.THD: (sequences * places,),
                BatchAxes.BSHD: (sequences, places),
                BatchAxes.SBHD: (places, sequences),
            }[axes]
        )
        assert np.array_equal(flat_slots(array, axes), slots)


def left_padded() -> PaddedBatch:
    return PaddedBatch(np.array([[False, True, True]]), 3, 3)


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("C-CU-START", lambda: PackedBatch.of_cu_seqlens([1, 3], 8)),
        ("C-CU-START", lambda: PackedBatch.of_cu_seqlens([], 8)),
        ("C-CU-START", lambda: PackedBatch.of_cu_seqlens([0, 3], 8, [0, 3, 4])),
        ("C-CU-OVERLAP", lambda: PackedBatch.of_cu_seqlens([0, 3, 2], 8)),
        ("C-CU-OVERLAP", lambda: PackedBatch.of_cu_seqlens([0, 3, 4], 8, [0, 2, 4])),
        ("C-CU-OVERLAP", lambda: PackedBatch.of_padded([5, 2], 4)),
        ("C-CU-TOTAL", lambda: PackedBatch.of_padded([2, 5], 4)),
        ("C-CU-OVERLAP", lambda: PackedBatch(np.zeros(2, np.int64), np.zeros(1, np.int64), 4)),
        ("C-CU-TOTAL", lambda: PackedBatch.of_cu_seqlens([0, 9], 8)),
        ("C-CU-TOTAL", lambda: PackedBatch.of_cu_seqlens([0, 3], 8).unpack(np.zeros(7, np.uint8))),
        ("C-CU-LENGTH", lambda: PackedBatch.of_cu_seqlens([0, 3], 8).positions([2])),
        ("C-CU-LENGTH", lambda: PackedBatch.of_cu_seqlens([0, 3], 8).pack([np.zeros(2, np.uint8)])),
        ("C-PADDED", lambda: PaddedBatch(np.ones((2, 3), np.bool_), 4, 3)),
        ("C-PADDED", lambda: PaddedBatch(np.ones((2, 3), np.bool_), 1, 4)),
        ("C-MASK-PADDING", lambda: left_padded().selection(left_padded().everything())),
        ("C-CU-AXES", lambda: flat_slots(np.zeros((2, 3, 4), np.uint8), BatchAxes.SBHD)),
        ("C-CU-AXES", lambda: shaped(np.zeros((5, 3, 4), np.uint8), BatchAxes.SBHD, 2)),
    ],
)
def test_lengths_that_cannot_be_right_are_refused(code, call):
    assert refused(call) == code
