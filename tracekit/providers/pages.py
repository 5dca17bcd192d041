"""The KV of a call through pages: written into a cache and read back by the canonicaliser.

A kernel that takes logical rows serves paged engines through such a reading (`engines/vllm_backend.py`), so a
paged launch of it is this round trip and then the kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tracekit.canonical.page_layout import Cache, PageLayout
from tracekit.canonical.paged import gather, scatter
from tracekit.model import Array, AttentionCall, Bits, DType, KVFamily, KVRows
from tracekit.providers.placement import NULL_PAGE, Fill, Layout, Placement

DEFAULT_PAGE = 16
Table = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Paged:
    """The rows of one family of a call in a cache.

    Args:
        cache: as `PageLayout.views` takes it.
        layout: of the cache.
        tables: int32 `[nb]` a request, in the order of `rows.requests`.
    """

    cache: Cache
    layout: PageLayout
    tables: tuple[Table, ...]


def through_pages(call: AttentionCall, placement: Placement) -> AttentionCall:
    """Return a call over the KV rows that were read back from the pages of a placement.

    Raises:
        InvalidCall: `C-...`, the cache or a table does not hold what was written.
    """
    return read_back(call, {family: write(call, family, placement) for family in call.selection.families})


def write(call: AttentionCall, family: KVFamily, placement: Placement) -> Paged:
    """Return a cache that holds the rows of one family of a call; see `Placement`."""
    rows = [call.kv[key][family] for key in call.rows.requests]
    kind = placement.layout or Layout.JOINED_NHD
    layout = kind.pages(call, placement.page_size or DEFAULT_PAGE)
    # Before the first row a table names the null page, as engines do behind a sliding window.
    dead = [one.first // layout.page_size for one in rows]
    counts = [-(-one.end // layout.page_size) - gone for one, gone in zip(rows, dead, strict=True)]
    names, total = placement.pages(sum(counts))
    live = np.split(names, np.cumsum(counts)[:-1])
    tables = tuple(
        np.concatenate([np.full(gone, NULL_PAGE, np.int32), part])
        for gone, part in zip(dead, live, strict=True)
    )
    cache = layout.empty(total, call.dtype.container)
    cache = (
        _hot(cache, layout, rows) if placement.fill is None else _filled(cache, placement.fill, call.dtype)
    )
    if kind is Layout.HEADS_FIRST and not isinstance(cache, tuple):
        cache = np.ascontiguousarray(cache.swapaxes(0, 1)).swapaxes(0, 1)
    for table, one in zip(tables, rows, strict=True):
        values = None if one.values is None else one.values.data
        scatter(cache, layout, table, one.first, one.keys.data, values, null_page=NULL_PAGE)
    return Paged(cache, layout, tables)


def read_back(call: AttentionCall, paged: Mapping[KVFamily, Paged]) -> AttentionCall:
    """Return a call over the rows that the tables of its families name."""
    kv = {}
    for index, key in enumerate(call.rows.requests):
        families = {}
        for family, pages in paged.items():
            held = call.kv[key][family]
            keys, values = gather(
                pages.cache, pages.layout, pages.tables[index], held.first, held.end, null_page=NULL_PAGE
            )
            families[family] = rows_like(held, keys, values)
        kv[key] = families
    return call.with_kv(kv)


def rows_like(held: KVRows, keys: Array, values: Array | None) -> KVRows:
    """Return rows with the place of some and the patterns of others."""
    dtype = held.keys.dtype
    return replace(held, keys=Bits(keys, dtype), values=None if values is None else Bits(values, dtype))


def hot_rows(bits: Bits) -> Array:
    """Return `[N, Hkv, D]` patterns of the size of some rows, and none of them: rolled by one element.

    What is no finite number becomes zero: it would spoil a sum in which its weight is zero.
    """
    finite = np.isfinite(bits.to_float32())
    return np.roll(np.where(finite, bits.data, bits.data.dtype.type(0)), 1, axis=2)


def _filled(cache: Cache, fill: Fill, dtype: DType) -> Cache:
    for part in cache if isinstance(cache, tuple) else (cache,):
        part.fill(fill.pattern(dtype))
    return cache


def _hot(cache: Cache, layout: PageLayout, rows: list[KVRows]) -> Cache:
    """Fill every row of a cache with hot numbers; rows of requests are written over them."""
    source = max(rows, key=lambda one: one.count)
    if source.count:
        sides = (hot_rows(source.keys), hot_rows(source.value_bits))
        for view, side in zip(layout.views(cache), sides, strict=True):
            if view is not None:
                places = np.arange(view.shape[0] * view.shape[1]) % len(side)
                view[...] = side[places].reshape(view.shape)
    return cache
