"""Paged KV both ways, and what is refused instead of guessed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.canonical.layouts import any_layout, element, layouts, refused
from tracekit.canonical.page_layout import Order, PageLayout, Place
from tracekit.canonical.paged import family_page_size, gather, page_slots, scatter
from tracekit.errors import ConventionAmbiguous
from tracekit.model import KVFamily

DENSE = PageLayout(4, 2, 3)


@settings(deadline=None)
@given(any_layout(), st.integers(0, 13), st.integers(0, 13), st.randoms(use_true_random=False))
def test_rows_go_through_any_layout_and_come_back(layout, first, count, random):
    """The bytes that come back are the bytes that went in, and nobody else's memory is touched."""
    places = -(-(first + count) // layout.page_size)
    table = random.sample(range(places + 3), places)
    numbers = np.random.default_rng(random.getrandbits(32))
    keys = numbers.integers(0, 2**16, (count, layout.kv_heads, layout.key_dim), np.uint16)
    values = numbers.integers(0, 2**16, (count, layout.kv_heads, layout.width), np.uint16)
    if layout.place is Place.SHARED:
        values = None
    cache = layout.empty(places + 3, np.uint16, fill=0x7FC1)

    scatter(cache, layout, table, first, keys, values)
    got_keys, got_values = gather(cache, layout, table, first, first + count)

    assert np.array_equal(got_keys, keys)
    assert values is None if got_values is None else np.array_equal(got_values, values)
    arrays = cache if isinstance(cache, tuple) else (cache,)
    assert sum((array != 0x7FC1).sum() for array in arrays) <= keys.size + (
        0 if values is None else values.size
    )


@pytest.mark.parametrize(
    "layout", layouts(3, 2, 4, 5), ids=lambda one: f"{one.place}-{one.order}-{one.kv_axis}"
)
def test_every_layout_is_read_as_a_kernel_reads_it(layout):
    cache = layout.empty(3, np.uint32)
    count = 0
    for array in cache if isinstance(cache, tuple) else (cache,):
        array[...] = np.arange(count, count + array.size).reshape(array.shape)
        count += array.size

    keys, values = gather(cache, layout, [2, 0], 0, 6)

    for row in range(6):
        page, offset = [2, 0][row // 3], row % 3
        for head in range(2):
            assert [int(x) for x in keys[row, head]] == [
                element(cache, layout, page, offset, head, d, value=False) for d in range(4)
            ]
            if values is not None:
                assert [int(x) for x in values[row, head]] == [
                    element(cache, layout, page, offset, head, d, value=True) for d in range(layout.width)
                ]


def test_a_cache_of_any_strides_is_read_in_place():
    """An engine may hold the logical [pages, B, Hkv, 2D] over memory that lies head by head."""
    memory = np.arange(3 * 2 * 4 * 6, dtype=np.uint16).reshape(3, 2, 4, 6)

    keys, values = DENSE.views(memory.swapaxes(1, 2))

    assert np.shares_memory(keys, memory)
    assert np.array_equal(keys[1, 2, 1], memory[1, 1, 2, :3])
    assert np.array_equal(values[1, 2, 1], memory[1, 1, 2, 3:])


def test_two_local_kv_heads_do_not_decide_which_axis_is_kv():
    """RL-Kernel#388: exactly 2 local KV heads and 2 pages, constant per head, read along the wrong axis."""
    cache = np.empty((2, 2, 2, 2, 3), np.uint16)
    cache[...] = np.array([10, 20], np.uint16)[:, None]  # heads 0 and 1, the same in K, V and every page

    assert refused(lambda: PageLayout(2, 2, 3, place=Place.STACKED).views(cache)) == "C-KV-AXIS"
    with pytest.raises(ConventionAmbiguous, match="axes 0 and 1 and 2 and 3"):
        gather(cache, PageLayout(2, 2, 3, place=Place.STACKED), [0], 0, 1)
    keys, _ = gather(cache, PageLayout(2, 2, 3, place=Place.STACKED, kv_axis=0), [0], 0, 2)
    assert keys[:, 0].ravel().tolist() == [10] * 6
    assert keys[:, 1].ravel().tolist() == [20] * 6


def test_one_possible_kv_axis_is_taken_and_a_declared_one_must_fit():
    layout = PageLayout(4, 2, 3, place=Place.STACKED)
    assert layout.views(np.zeros((2, 7, 4, 2, 3), np.uint16))[0].shape == (7, 4, 2, 3)
    assert layout.views(np.zeros((7, 2, 4, 2, 3), np.uint16))[0].shape == (7, 4, 2, 3)
    declared = PageLayout(4, 2, 3, place=Place.STACKED, kv_axis=1)
    assert refused(lambda: declared.views(np.zeros((2, 7, 4, 2, 3), np.uint16))) == "C-KV-AXIS"
    assert refused(lambda: layout.empty(2, np.uint16)) == "C-KV-AXIS"


@pytest.mark.parametrize("page_size", [1, 64])
def test_page_one_and_page_sixty_four_hold_the_same_rows(page_size):
    """aiter#3095: the same KV at page size 1 and at 64 gave different answers."""
    rows = np.arange(130 * 576, dtype=np.uint32).astype(np.uint16).reshape(130, 1, 576)
    layout = PageLayout(page_size, 1, 576, place=Place.SHARED)
    table = np.random.default_rng(0).permutation(140)[: -(-130 // page_size)] % 140
    cache = layout.empty(140, np.uint16, fill=0xFFFF)
    scatter(cache, layout, table, 0, rows, None)
    assert np.array_equal(gather(cache, layout, table, 0, 130)[0], rows)


def test_a_row_high_in_a_big_cache_does_not_wrap():
    """vLLM#52109: an element offset past 2 GiB did not fit 32 bits. Tables are int32, slots are not."""
    table = np.array([2**31 - 1], np.int32)
    assert page_slots(table, [255], 256, pages=2**31).tolist() == [(2**31 - 1) * 256 + 255]


def test_a_compressed_family_counts_its_own_rows():
    assert [family_page_size(256, family) for family in (KVFamily.DENSE, KVFamily.C4, KVFamily.C128)] == [
        256,
        64,
        2,
    ]
    assert page_slots([5, 3], [0, 1, 2, 3], 2, pages=6).tolist() == [10, 11, 6, 7]
    assert refused(lambda: family_page_size(64, KVFamily.C128)) == "C-PAGE-RATIO"


@pytest.mark.parametrize(
    ("code", "table", "rows"),
    [
        ("C-PAGE-OUTSIDE", [0, 8], [5]),
        ("C-PAGE-TWICE", [3, 1, 3], [0, 9]),
        ("C-PAGE-HOLE", [3, -1, 2], [9, 4]),
        ("C-PAGE-NULL", [3, 0], [4]),
        ("C-PAGE-LENGTH", [3, 1], [8]),
        ("C-PAGE-ROW", [3, 1], [-1]),
        ("C-INTEGERS", [0.5], [0]),
        ("C-INTEGERS", [[1, 2]], [0]),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(code, table, rows):
    assert refused(lambda: page_slots(table, rows, 4, pages=8, null_page=0)) == code


def test_only_the_pages_of_the_rows_asked_for_are_looked_at():
    """Dead entries are anything: a hole, a page of another row, a page outside."""
    assert page_slots([-1, 99, 5, 5], [8, 9], 4, pages=8).tolist() == [20, 21]


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("C-BITS", lambda: DENSE.views(np.zeros((2, 4, 2, 6), np.float32))),
        ("C-PAGE-SHAPE", lambda: DENSE.views(np.zeros((2, 4, 2, 5), np.uint16))),
        ("C-PAGE-SHAPE", lambda: DENSE.views((np.zeros((2, 4, 2, 3), np.uint16),) * 2)),
        (
            "C-PAGE-SHAPE",
            lambda: PageLayout(4, 2, 3, place=Place.APART).views(np.zeros((2, 4, 2, 3), np.uint16)),
        ),
        (
            "C-PAGE-SHAPE",
            lambda: PageLayout(4, 2, 3, place=Place.PACKED, order=Order.HND).views(
                np.zeros((2, 2, 6, 4), np.uint16).swapaxes(2, 3)
            ),
        ),
        ("C-PAGE-ROW", lambda: gather(DENSE.empty(2, np.uint16), DENSE, [0], 3, 2)),
        ("C-LAYOUT", lambda: PageLayout(0, 2, 3)),
        ("C-LAYOUT", lambda: PageLayout(4, 2, 3, keys_transposed=True)),
        ("C-LAYOUT", lambda: PageLayout(4, 2, 3, place=Place.PACKED)),
        ("C-LAYOUT", lambda: PageLayout(4, 2, 3, 5, place=Place.SHARED)),
        ("C-LAYOUT", lambda: PageLayout(4, 2, 3, kv_axis=1)),
    ],
)
def test_a_cache_that_is_not_as_described_is_refused(code, call):
    assert refused(call) == code


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (np.zeros((1, 2, 3), np.uint16), None),
        (np.zeros((1, 2, 3), np.uint8), np.zeros((1, 2, 3), np.uint16)),
        (np.zeros((1, 2, 3), np.uint16), np.zeros((1, 2, 4), np.uint16)),
    ],
)
def test_rows_that_would_be_cast_or_broadcast_are_refused(keys, values):
    assert refused(lambda: scatter(DENSE.empty(2, np.uint16), DENSE, [0], 0, keys, values)) == "C-ROW-SHAPE"
