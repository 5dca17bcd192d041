"""Rings, token pools and windows: memory whose old rows belong to somebody else by now."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.canonical.layouts import refused
from tracekit.canonical.page_layout import PageLayout
from tracekit.canonical.paged import gather, scatter
from tracekit.canonical.pool import pool_slots
from tracekit.canonical.ring import ring_fill, ring_slots
from tracekit.canonical.window import live_rows, window_from_left, window_ranges
from tracekit.model import Lists, Ranges


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 5), st.integers(0, 40), st.data())
def test_a_ring_gives_back_the_last_rows_written(length, base, end, data):
    stored = np.full(base + length + 2, -1)
    memory = np.zeros(stored.size, np.uint16)
    written = 0
    while written < end:
        step = min(data.draw(st.integers(1, length)), end - written)
        slots, stored = ring_fill(stored, range(written, written + step), base=base, length=length)
        memory[slots] = np.arange(written, written + step) + 1000
        written += step

    alive = range(max(0, end - length), end)
    slots = ring_slots(alive, base=base, length=length, stored=stored)

    assert memory[slots].tolist() == [position + 1000 for position in alive]
    if end > length:
        evicted = [end - length - 1]
        assert refused(lambda: ring_slots(evicted, base=base, length=length, stored=stored)) == "C-RING-STALE"


def test_a_prefix_hit_does_not_read_another_requests_ring():
    """ROCm/ATOM#1417: B hits a prefix of 192 tokens of A, but has another ring, with rows of a dead request.

    The window of B's first new row needs positions 65 .. 191, and B's ring never held them.
    """
    length = 128
    stored, owners = np.full(2 * length, -1), np.full(2 * length, -1)
    for owner, base, tokens in ((0, 0, 200), (7, length, 320)):  # A, and a dead request in B's ring
        first = max(0, tokens - length)
        slots, stored = ring_fill(stored, range(first, tokens), base=base, length=length)
        owners[slots] = owner
    needed = range(192 - length + 1, 192)

    ring = {"base": length, "length": length, "stored": stored}
    assert refused(lambda: ring_slots(needed, **ring)) == "C-RING-STALE"

    # The dead request ended at 192: every stored position is the expected one, and still no row is B's.
    slots, stored = ring_fill(stored, range(64, 192), base=length, length=length)
    owners[slots] = 7
    ring["stored"] = stored
    assert ring_slots(needed, **ring).size == 127
    assert refused(lambda: ring_slots(needed, **ring, owners=owners, owner=1)) == "C-RING-OWNER"
    assert ring_slots(needed, **ring, owners=owners, owner=7).size == 127


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("C-RING-SHAPE", lambda: ring_slots([0], base=2, length=4, stored=[0] * 5)),
        ("C-RING-SHAPE", lambda: ring_slots([0], base=0, length=4, stored=[0] * 5, owner=1)),
        ("C-RING-SHAPE", lambda: ring_slots([0], base=0, length=4, stored=[0] * 5, owners=[1], owner=1)),
        ("C-RING-LENGTH", lambda: ring_slots([0, 4], base=0, length=4, stored=[0] * 5)),
        ("C-RING-LENGTH", lambda: ring_slots([-1], base=0, length=4, stored=[-1] * 5)),
        ("C-RING-LENGTH", lambda: ring_fill([0] * 5, range(9), base=0, length=4)),
        ("C-RING-STALE", lambda: ring_slots([4], base=0, length=4, stored=[0] * 5)),
        ("C-POOL-ROW", lambda: pool_slots([[1, 2]], 1, 0, 1, slots=9)),
        ("C-POOL-ROW", lambda: pool_slots([[1, 2]], 0, 2, 1, slots=9)),
        ("C-POOL-LENGTH", lambda: pool_slots([[1, 2]], 0, 0, 3, slots=9)),
        ("C-POOL-OUTSIDE", lambda: pool_slots([[1, 9]], 0, 0, 2, slots=9)),
        ("C-POOL-OUTSIDE", lambda: pool_slots([[1, -1]], 0, 0, 2, slots=9)),
        ("C-POOL-OUTSIDE", lambda: pool_slots([[1, 4]], 0, 0, 2, slots=9, translate=[0, 1, 2])),
        ("C-POOL-TWICE", lambda: pool_slots([[1, 1]], 0, 0, 2, slots=9)),
        ("C-POOL-NULL", lambda: pool_slots([[1, 0]], 0, 0, 2, slots=9, null_slot=0)),
        ("C-POOL-NULL", lambda: pool_slots([[1, 2]], 0, 0, 2, slots=9, null_slot=0, translate=[0, 5, 0])),
        ("C-WINDOW", lambda: live_rows(3, 4, None)),
        ("C-WINDOW", lambda: live_rows(3, 1, 0)),
    ],
)
def test_what_cannot_be_right_is_refused(code, call):
    assert refused(call) == code


@settings(deadline=None)
@given(st.permutations(range(20)), st.integers(0, 10), st.integers(0, 10))
def test_a_pool_gives_the_rows_back_and_the_smaller_pool_too(order, first, count):
    rows = np.arange(count, dtype=np.uint16) + 7
    buffer = np.zeros(20, np.uint16)
    table = np.zeros((3, 25), np.int32)
    table[1, first : first + count] = order[:count]
    slots = pool_slots(table, 1, first, first + count, slots=20)
    buffer[slots] = rows
    assert np.array_equal(buffer[slots], rows)

    smaller = np.full(20, -1)
    smaller[order[:count]] = np.arange(count)
    assert pool_slots(table, 1, first, first + count, slots=count, translate=smaller).tolist() == list(
        range(count)
    )


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.none() | st.integers(1, 70))
def test_live_rows_are_exactly_the_union_of_what_is_read(length, new, window):
    new = min(new, length)
    first, end = live_rows(length, new, window)
    ranges = window_ranges(np.arange(length - new, length), window)
    assert isinstance(ranges, Ranges)
    read = set(Lists.of([ranges.row(t) for t in range(new)]).ids.tolist())
    assert read <= set(range(first, end))
    if new:
        assert (min(read), max(read) + 1) == (first, end)


def test_a_window_counted_without_the_row_itself():
    """FlashAttention's left and SGLang's size leave the row itself out; -1 is no window."""
    assert [window_from_left(left) for left in (-1, 0, 127)] == [None, 1, 128]


def test_reused_blocks_behind_the_window_are_never_read():
    """vLLM gives the blocks behind a window away and leaves their ids in the table: 301 tokens, window 16."""
    layout = PageLayout(32, 1, 2)
    table = [1, 2, 1, 5, 1, 2, 1, 5, 1, 2]
    cache = layout.empty(6, np.uint16, fill=0x7FC1)
    first, end = live_rows(301, 1, 16)
    rows = np.arange((end - first) * 2, dtype=np.uint16).reshape(-1, 1, 2)
    scatter(cache, layout, table, first, rows, rows + 1)

    keys, values = gather(cache, layout, table, first, end)

    assert (first, end) == (285, 301)
    assert np.array_equal(keys, rows)
    assert np.array_equal(values, rows + 1)
    assert refused(lambda: gather(cache, layout, table, 0, end)) == "C-PAGE-TWICE"
