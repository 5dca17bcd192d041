"""Physical indices and logical rows, both ways; nothing physical gets through."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.canonical.layouts import refused
from tracekit.canonical.paged import page_slots
from tracekit.canonical.selection import LiveSlots, Workspace, split_families, to_logical, to_physical
from tracekit.model import Lists


@st.composite
def paged_requests(draw: st.DrawFn) -> tuple[list[LiveSlots], np.ndarray, Lists]:
    """Requests in one cache, each with pages of its own, and lists over their live rows."""
    page_size = draw(st.integers(1, 4))
    pages = draw(st.permutations(range(30)))
    live = []
    for number in range(draw(st.integers(1, 3))):
        first, count = draw(st.integers(0, 4)), draw(st.integers(0, 6))
        table = pages[10 * number :][:10]  # enough for ten pages of one row
        live.append(LiveSlots(page_slots(table, np.arange(first, first + count), page_size, pages=30), first))
    owner = np.array(draw(st.lists(st.integers(0, len(live) - 1), max_size=5)), np.int64)
    lists = []
    for request in owner:
        one = live[request]
        order = draw(st.permutations(range(one.slots.size)))
        lists.append(np.array(order[: draw(st.integers(0, len(order)))], np.int64) + one.first)
    return live, owner, Lists.of(lists)


@settings(deadline=None)
@given(paged_requests(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_lists_go_to_slots_and_come_back_in_order(case, slack, random):
    live, owner, lists = case
    width = int(np.diff(lists.offsets).max(initial=0)) + slack
    indices = to_physical(lists, owner, live, width)
    holed = indices.copy()
    for row in holed:  # holes may stand anywhere, and are no rows
        at = sorted(random.sample(range(width), int((row != -1).sum())))
        row[:], kept = -1, row[row != -1]
        row[at] = kept

    for table in (indices, holed):
        back = to_logical(table, owner, live)
        assert np.array_equal(back.ids, lists.ids)
        assert np.array_equal(back.offsets, lists.offsets)


def test_what_stands_behind_the_length_is_not_read():
    live = [LiveSlots([8, 9, 4])]
    back = to_logical([[4, 8, 77]], [0], live, lengths=[2])
    assert back.ids.tolist() == [2, 0]
    assert refused(lambda: to_logical([[4, 8, 77]], [0], live)) == "C-SEL-PHYSICAL"


def test_an_index_relative_to_another_request_is_refused():
    """vLLM#56749: relative and absolute indices were mixed up where a request does not start at row 0."""
    space = Workspace(stride=8)
    held = [space.recent_rows(request, 0, 5) for request in range(2)]
    assert to_logical([[8, 12]], [1], held).ids.tolist() == [0, 4]
    assert refused(lambda: to_logical([[0, 4]], [1], held)) == "C-SEL-PHYSICAL"
    assert refused(lambda: to_logical([[13]], [1], held)) == "C-SEL-PHYSICAL"


def test_a_hole_is_never_row_minus_one_or_slot_zero():
    """vLLM#57156: an invalid index gathered slot 0, where capture had left NaN."""
    live = [LiveSlots(np.arange(4) + 4)]
    assert to_logical([[-1, 5, -1]], [0], live).ids.tolist() == [1]
    assert refused(lambda: to_logical([[0]], [0], live)) == "C-SEL-PHYSICAL"
    assert refused(lambda: to_logical([[-2]], [0], live)) == "C-SEL-PHYSICAL"


def test_a_workspace_is_cut_into_its_families():
    """vLLM's prefill gather: `M * b + i` compressed, `M * b + N + j` recent."""
    space = Workspace(stride=10, compressed=4)
    compressed = [space.compressed_rows(request, count) for request, count in ((0, 4), (1, 2))]
    recent = [space.recent_rows(request, first, 3) for request, first in ((0, 20), (1, 7))]
    indices = [[3, 0, 4, 6], [11, 10, 14, -1], [15, 16, -1, -1]]

    rows, window = split_families(indices, [0, 1, 1], [compressed, recent])

    assert [rows.row(t).tolist() for t in range(3)] == [[3, 0], [1, 0], []]
    assert [window.row(t).tolist() for t in range(3)] == [[20, 22], [7], [8, 9]]


MIXED = [[LiveSlots([0, 1])], [LiveSlots([4, 5])]]


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("C-SEL-SLOTS", lambda: LiveSlots([1, 1])),
        ("C-SEL-SLOTS", lambda: LiveSlots([-1, 1])),
        ("C-SEL-SHAPE", lambda: to_logical([[0]], [0, 0], [LiveSlots([0])])),
        ("C-SEL-SHAPE", lambda: to_logical([[0]], [1], [LiveSlots([0])])),
        ("C-SEL-SHAPE", lambda: to_logical([[0]], [0], [LiveSlots([0])], [2])),
        ("C-SEL-PHYSICAL", lambda: to_logical([[0]], [0], [LiveSlots([])])),
        ("M-SEL-DUPLICATE", lambda: to_logical([[0, 0]], [0], [LiveSlots([0])])),
        ("C-SEL-SHAPE", lambda: to_physical(Lists.of([np.array([0, 1])]), [0], [LiveSlots([0, 1])], 1)),
        ("C-SEL-SHAPE", lambda: to_physical(Lists.of([np.array([0])]), [0], [LiveSlots([2**31])])),
        ("C-SEL-PHYSICAL", lambda: to_physical(Lists.of([np.array([2])]), [0], [LiveSlots([0, 1])])),
        ("C-SEL-WORKSPACE", lambda: Workspace(4, 5)),
        ("C-SEL-WORKSPACE", lambda: Workspace(4, 2).compressed_rows(0, 3)),
        ("C-SEL-WORKSPACE", lambda: Workspace(4, 2).recent_rows(0, 9, 3)),
        ("C-SEL-MIXED", lambda: split_families([[4, 0, 5]], [0], MIXED)),
        ("C-SEL-PHYSICAL", lambda: split_families([[0, 3]], [0], MIXED)),
        ("C-SEL-SHAPE", lambda: split_families([[0]], [0], [])),
        ("C-SEL-SHAPE", lambda: split_families([[0]], [0, 0], MIXED)),
    ],
)
def test_indices_that_cannot_be_right_are_refused(code, call):
    assert refused(call) == code
