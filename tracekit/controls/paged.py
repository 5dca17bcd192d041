"""What the twins of pages share: KV read from a cache by a kernel that checks nothing."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tracekit.canonical.page_layout import PageLayout
from tracekit.model import Array, AttentionCall
from tracekit.providers.pages import Paged, rows_like, write
from tracekit.providers.placement import Placement

Misread = Callable[[Paged], Paged]
"""How a kernel mistakes a cache, or its tables, for others."""


def misread(call: AttentionCall, placement: Placement, mistake: Misread) -> AttentionCall:
    """Return a call over the KV that a kernel reads which takes its pages for others.

    Args:
        call: the call.
        placement: where it lies.
        mistake: what the kernel takes a cache for.
    """
    kv = {key: dict(call.kv[key]) for key in call.rows.requests}
    for family in call.selection.families:
        paged = mistake(write(call, family, placement))
        keys, values = paged.layout.views(paged.cache)
        for key, table in zip(call.rows.requests, paged.tables, strict=True):
            held = kv[key][family]
            at = _places(table, np.arange(held.first, held.end), paged.layout.page_size, len(keys))
            kv[key][family] = rows_like(held, keys[at], None if values is None else values[at])
    return call.with_kv(kv)


def taken_for(paged: Paged, layout: PageLayout) -> Paged:
    """Return the same memory in another layout; what does not fill a page of it is left out.

    For the memory behind a cache that is smaller than one such page, the cache itself stands.
    """
    parts = paged.cache if isinstance(paged.cache, tuple) else (paged.cache,)
    memory = np.concatenate([_memory(part) for part in parts])
    shapes = [part.shape[1:] for part in _arrays(layout, memory.dtype)]
    page = sum(int(np.prod(shape)) for shape in shapes)
    memory = np.resize(memory, max(memory.size, page))
    pages = memory.size // page
    arrays, start = [], 0
    for shape in shapes:
        size = pages * int(np.prod(shape))
        arrays.append(memory[start : start + size].reshape(pages, *shape))
        start += size
    return replace(paged, layout=layout, cache=arrays[0] if len(arrays) == 1 else (arrays[0], arrays[1]))


def _memory(array: Array) -> Array:
    """The elements of an array in the order of their addresses."""
    axes = np.argsort([-stride for stride in array.strides], kind="stable")
    return np.ascontiguousarray(array.transpose(axes)).reshape(-1)


def _arrays(layout: PageLayout, dtype: npt.DTypeLike) -> tuple[Array, ...]:
    cache = layout.empty(1, dtype)
    return cache if isinstance(cache, tuple) else (cache,)


def _places(table: Array, rows: Array, page_size: int, pages: int) -> tuple[Array, Array]:
    """Page and offset of each row; past the table and past the cache it reads on from their start."""
    if not table.size:
        return rows, rows
    return table[rows // page_size % table.size] % pages, rows % page_size
