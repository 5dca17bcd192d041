"""Every page layout of docs/canonical.md, and an independent slow reading of each."""

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from tracekit.canonical.page_layout import Cache, Order, PageLayout, Place


def layouts(page_size: int, heads: int, dim: int, width: int) -> list[PageLayout]:
    """All layouts that a cache of these sizes can have."""
    found = [
        PageLayout(page_size, heads, dim, width, Place.PACKED, Order.HND, keys_transposed=transposed)
        for transposed in (False, True)
    ]
    for order in Order:
        found.append(PageLayout(page_size, heads, dim, width, Place.APART, order))
        found.append(PageLayout(page_size, heads, dim, width, Place.JOINED, order))
        found.append(PageLayout(page_size, heads, dim, None, Place.SHARED, order))
        found += [PageLayout(page_size, heads, dim, None, Place.STACKED, order, axis) for axis in range(4)]
    return found


@st.composite
def any_layout(draw: st.DrawFn) -> PageLayout:
    """Draw a layout of small odd sizes."""
    sizes = st.integers(1, 5)
    return draw(st.sampled_from(layouts(draw(sizes), draw(sizes), draw(sizes), draw(sizes))))


def element(cache: Cache, layout: PageLayout, page: int, row: int, head: int, d: int, *, value: bool) -> int:
    """One element by index arithmetic on the raw memory of the page, as an engine's kernel reads it."""
    at: tuple[int, ...] = (page, row, head) if layout.order is Order.NHD else (page, head, row)
    dim, rows = layout.key_dim, layout.page_size
    match layout.place:
        case Place.APART:
            return int(cache[int(value)][(*at, d)])
        case Place.SHARED:
            return int(np.asarray(cache)[(*at, d)])
        case Place.JOINED:
            return int(np.asarray(cache)[(*at, dim * value + d)])
        case Place.STACKED:
            index = [*at, d]
            assert layout.kv_axis is not None
            index.insert(layout.kv_axis, int(value))
            return int(np.asarray(cache)[tuple(index)])
        case Place.PACKED:
            flat = np.asarray(cache)[page, head].reshape(-1)
            if value:
                return int(flat[rows * dim + row * layout.width + d])
            return int(flat[d * rows + row] if layout.keys_transposed else flat[row * dim + d])


def refused(call: Callable[[], object]) -> str:
    """The rule code with which a call is refused."""
    from tracekit.errors import TracekitError

    try:
        call()
    except TracekitError as error:
        return error.rule
    return "not refused"
