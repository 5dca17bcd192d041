"""Owners of KV rows: every layout covers every row once, and every illegal cut has its own name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.canonical.owners import (
    Owner,
    check_owners,
    contiguous_owners,
    split_owners,
    zigzag_owners,
)
from tracekit.errors import InvalidCall

ROWS = st.tuples(st.integers(0, 900), st.integers(0, 900)).map(sorted)


@given(ROWS, st.integers(1, 9), st.sampled_from([1, 7, 128]))
def test_every_layout_covers_every_row_once_with_whole_leaves(rows, ranks: int, leaf: int):
    first, end = rows
    for layout in (contiguous_owners, zigzag_owners):
        owners = layout(first, end, ranks, leaf)
        assert len(owners) == ranks
        check_owners(owners, first, end, leaf)
        assert sum(one.rows for one in owners) == end - first
        leaves = [i for one in owners for i in one.leaves(leaf)]
        assert sorted(leaves) == sorted(set(leaves))
    check_owners(split_owners(first, end, 2 * leaf, leaf), first, end, leaf)


def test_zigzag_pairs_the_first_part_with_the_last():
    owners = zigzag_owners(0, 1024, 2, 128)
    assert [one.ranges for one in owners] == [((0, 256), (768, 1024)), ((256, 768),)]


def test_more_ranks_than_leaves_leave_some_empty():
    owners = contiguous_owners(0, 200, 4, 128)
    assert [one.rows for one in owners] == [0, 128, 0, 72]


@pytest.mark.parametrize(
    ("rule", "owners"),
    [
        ("C-OWN-ALIGNED", [Owner(((0, 100),)), Owner(((100, 300),))]),
        ("C-OWN-DUPLICATE", [Owner(((0, 256),)), Owner(((128, 300),))]),
        ("C-OWN-GAP", [Owner(((0, 128),)), Owner(((256, 300),))]),
        ("C-OWN-GAP", [Owner(((0, 256),))]),
        ("C-OWN-GAP", [Owner()]),
        ("C-OWN-OUTSIDE", [Owner(((0, 301),))]),
        ("C-OWN-OUTSIDE", [Owner(((0, 300),)), Owner(((128, 128),))]),
    ],
)
def test_owners_that_would_give_other_bits_are_refused_by_name(rule: str, owners: list[Owner]):
    with pytest.raises(InvalidCall) as error:
        check_owners(owners, 0, 300, 128)
    assert error.value.rule == rule


def test_sizes_that_cut_leaves_are_refused():
    with pytest.raises(InvalidCall) as error:
        split_owners(0, 300, 192, 128)
    assert error.value.rule == "C-OWN-ALIGNED"
    with pytest.raises(InvalidCall) as error:
        contiguous_owners(0, 300, 0, 128)
    assert error.value.rule == "C-OWN-SIZE"
