"""Paged KV: the rows of one request through its block table, out of a cache and back into one.

`slot = table[i // B] * B + i % B` for logical row i of a family and B rows a page. A compressed family counts
its own rows: row i holds `ratio` tokens, and a page of a block of `block_size` tokens has
`B = block_size / ratio` of them.
"""

import numpy as np
import numpy.typing as npt

from tracekit.canonical.page_layout import Cache, PageLayout
from tracekit.canonical.refuse import Int64, first_true, integers, need_patterns, refuse
from tracekit.model import Array, KVFamily


def family_page_size(block_size: int, family: KVFamily) -> int:
    """Return B, the rows of a page of a family, where the engine counts a block in tokens.

    Raises:
        InvalidCall: `C-PAGE-RATIO` when a block does not hold whole rows.
    """
    if block_size < 1 or block_size % family.ratio:
        refuse(
            "C-PAGE-RATIO",
            f"a block of {block_size} tokens does not hold whole rows of {family.ratio} tokens ({family}).",
            block_size=block_size,
            family=family.value,
        )
    return block_size // family.ratio


def page_slots(
    table: npt.ArrayLike,
    rows: npt.ArrayLike,
    page_size: int,
    *,
    pages: int,
    null_page: int | None = None,
) -> Int64:
    """Return the slot of each logical row of one request, int64 `[n]`.

    Only the pages of the rows asked for are looked at: behind a sliding window a table keeps pages that
    belong to other rows by now.

    Args:
        table: `[nb]`, the block table of the request.
        rows: `[n]`, logical row indices in the family of the table.
        page_size: B.
        pages: pages of the cache.
        null_page: a page that the engine never gives to a request (vLLM keeps page 0 for that), or None.

    Raises:
        InvalidCall: `C-PAGE-ROW` a row below 0; `C-PAGE-LENGTH` a row past the table; `C-PAGE-HOLE` a page
            below 0; `C-PAGE-NULL` the null page; `C-PAGE-OUTSIDE` a page past the cache; `C-PAGE-TWICE` one
            page under two places of the table.
    """
    entries, wanted = integers(table, "the block table"), integers(rows, "rows")
    if wanted.size and wanted.min() < 0:
        refuse("C-PAGE-ROW", f"logical row {int(wanted.min())} is below 0.", row=int(wanted.min()))
    if wanted.size and wanted.max() >= entries.size * page_size:
        refuse(
            "C-PAGE-LENGTH",
            f"row {int(wanted.max())} lies past a table of {entries.size} pages of {page_size} rows.",
            row=int(wanted.max()),
            table=entries.size,
            page_size=page_size,
        )
    places = wanted // page_size
    live = np.unique(places)
    _check_pages(live, entries[live], pages, null_page)
    return entries[places] * page_size + wanted % page_size


def _check_pages(places: Int64, ids: Int64, pages: int, null_page: int | None) -> None:
    def refuse_at(bad: npt.NDArray[np.bool_], rule: str, why: str) -> None:
        at = first_true(bad)
        if at is not None:
            refuse(
                rule,
                f"place {int(places[at])} of the block table holds page {int(ids[at])}, {why}.",
                place=int(places[at]),
                page=int(ids[at]),
                pages=pages,
            )

    refuse_at(ids < 0, "C-PAGE-HOLE", "a hole among rows that are read")
    refuse_at(ids >= pages, "C-PAGE-OUTSIDE", f"and the cache has {pages}")
    if null_page is not None:
        refuse_at(ids == null_page, "C-PAGE-NULL", "which belongs to no request")
    first = np.zeros(ids.size, np.bool_)
    first[np.unique(ids, return_index=True)[1]] = True
    refuse_at(
        ~first,
        "C-PAGE-TWICE",
        "which an earlier place holds too: one of the two rows is another row's memory",
    )


def gather(
    cache: Cache,
    layout: PageLayout,
    table: npt.ArrayLike,
    first: int,
    end: int,
    *,
    null_page: int | None = None,
) -> tuple[Array, Array | None]:
    """Return rows `first .. end - 1` of one request, owned.

    Args:
        cache: see `PageLayout.views`.
        layout: of the cache.
        table: `[nb]`, the block table of the request.
        first: first logical row.
        end: the row after the last; the sequence length, for a dense family.
        null_page: see `page_slots`.

    Returns:
        Keys `[n, Hkv, D]` and values `[n, Hkv, Dv]`; values are None where they are shared with the keys.

    Raises:
        InvalidCall: as `PageLayout.views` and `page_slots`; `C-PAGE-ROW` when `end < first`.
        ConventionAmbiguous: `C-KV-AXIS`.
    """
    keys, values = layout.views(cache)
    at = _places(layout, keys.shape[0], table, first, end, null_page)
    return keys[at], None if values is None else values[at]


def scatter(
    cache: Cache,
    layout: PageLayout,
    table: npt.ArrayLike,
    first: int,
    keys: Array,
    values: Array | None,
    *,
    null_page: int | None = None,
) -> None:
    """Write rows `first .. first + n - 1` of one request into a cache, in place; the inverse of `gather`.

    Args:
        cache: see `PageLayout.views`; writable.
        layout: of the cache.
        table: `[nb]`, the block table of the request.
        first: logical index of row 0.
        keys: `[n, Hkv, D]`, of the cache's dtype.
        values: `[n, Hkv, Dv]`, or None where they are shared with the keys.
        null_page: see `page_slots`.

    Raises:
        InvalidCall: as `gather`; `C-ROW-SHAPE` when the rows do not fit the layout.
    """
    views = layout.views(cache)
    at = _places(layout, views[0].shape[0], table, first, first + len(keys), null_page)
    for view, rows, name in zip(views, (keys, values), ("keys", "values"), strict=True):
        if view is None and rows is None:
            continue
        # A narrower or wider integer would be cast without a word, and the patterns would be lost.
        wanted = "nothing" if view is None else f"{view.dtype} {[len(keys), *view.shape[2:]]}"
        given = "nothing" if rows is None else f"{need_patterns(rows, name).dtype} {list(rows.shape)}"
        if view is None or rows is None or wanted != given:
            refuse("C-ROW-SHAPE", f"{name}: the layout holds {wanted}, not {given}.", name=name)
        view[at] = rows


def _places(
    layout: PageLayout, pages: int, table: npt.ArrayLike, first: int, end: int, null_page: int | None
) -> tuple[Int64, Int64]:
    """Page and offset of rows `first .. end - 1`."""
    if not 0 <= first <= end:
        refuse("C-PAGE-ROW", f"rows [{first}, {end}) are no range of rows.", first=first, end=end)
    rows = np.arange(first, end, dtype=np.int64)
    slots = page_slots(table, rows, layout.page_size, pages=pages, null_page=null_page)
    return slots // layout.page_size, slots % layout.page_size
