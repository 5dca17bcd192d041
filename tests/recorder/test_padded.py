import numpy as np
import pytest

from tracekit.canonical.padded import PaddedBatch
from tracekit.errors import InvalidCall
from tracekit.model import Lists, Ranges

LEFT = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)


def test_rows_are_the_real_slots():
    batch = PaddedBatch(LEFT, queries=5, keys=5)

    assert batch.row_slots.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert batch.sequence.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_a_dropped_start_moves_the_first_key():
    batch = PaddedBatch(LEFT, queries=1, keys=2)

    assert batch.positions.tolist() == [2, 4]
    assert [batch.first_key(b) for b in (0, 1)] == [1, 3]
    assert batch.key_slots(0) == slice(0, 2)


def test_the_mask_gives_ranges_in_logical_rows():
    batch = PaddedBatch(LEFT, queries=5, keys=5)
    visible = batch.causal() & LEFT[:, None, :]
    part = batch.selection(visible)

    assert isinstance(part, Ranges)
    assert part.lo.tolist() == [0] * 8
    assert part.hi.tolist() == [1, 2, 3, 1, 2, 3, 4, 5]


def test_a_mask_with_holes_gives_lists():
    batch = PaddedBatch(np.ones((1, 4), bool), queries=1, keys=4)
    part = batch.selection(np.array([[[1, 0, 1, 1]]], bool))

    assert isinstance(part, Lists)
    assert part.row(0).tolist() == [0, 2, 3]


def test_a_row_without_keys_reads_an_empty_range():
    batch = PaddedBatch(np.ones((1, 2), bool), queries=2, keys=2)
    part = batch.selection(np.array([[[0, 0], [1, 1]]], bool))

    assert (part.lo.tolist(), part.hi.tolist()) == ([0, 0], [0, 2])


def test_a_mask_that_reads_padding_is_refused():
    batch = PaddedBatch(LEFT, queries=5, keys=5)
    with pytest.raises(InvalidCall, match="read a padding slot"):
        batch.selection(batch.causal())


def test_lengths_that_do_not_fit():
    with pytest.raises(InvalidCall, match="do not fit"):
        PaddedBatch(LEFT, queries=6, keys=5)
