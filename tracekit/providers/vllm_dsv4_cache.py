"""The caches of vLLM's DeepSeek-V4 operator, filled from the KV rows of a call.

The operator reads two paged caches of `fp8_ds_mla` rows by slot numbers: one of the sliding window, one of
compressed rows. With a launch plan each row goes back to its place on its page; pages get new numbers, so
that a cache of gigabytes becomes as small as what the launch read. Without a plan the rows of each request
lie on pages of their own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracekit.canonical.fp8_ds_mla import CODES, GROUP, SCALES, LatentPages, LatentStorage, from_keys
from tracekit.canonical.paged import page_slots
from tracekit.canonical.refuse import Int64
from tracekit.canonical.selection import LiveSlots, to_physical
from tracekit.errors import InvalidCall
from tracekit.model import Array, AttentionCall, DType, KVFamily, KVRows, LaunchPlan, Lists, Ranges
from tracekit.providers.placement import Placement

FP8 = DType.FLOAT8_E4M3FN
BLOCK = 256
"""Tokens of a block of vLLM's cache for this model, unless a call says otherwise."""
WINDOW_PAGE = 64
MAX_PAGE = 1024
MAX_WIDTH = 1 << 16
MAX_BYTES = 1 << 32


@dataclass(frozen=True, eq=False)
class FamilyCache:
    """One of the two caches, and what each query row reads of it.

    Args:
        cache: uint8 `[pages, bytes]`.
        page_size: rows of a page.
        slots: int64 `[T, K]`, the slots that each row of the call reads, -1 behind them.
    """

    cache: Array
    page_size: int
    slots: Int64


def family_cache(
    call: AttentionCall, family: KVFamily, plan: LaunchPlan | None, placement: Placement | None = None
) -> FamilyCache:
    """Return the cache of one family of a call.

    Args:
        call: gives the rows, and what is read of them.
        family: `recent` or a compressed one.
        plan: the launch as it was; None makes a fresh one.
        placement: where a fresh one lies.

    Raises:
        InvalidCall: a row is none that such a cache can hold (`C-FP8-ENCODE`), or the plan gives rows no
            places of their own (`C-...`, `P-PLAN`).
    """
    rows = [call.kv[key][family] for key in call.rows.requests]
    page = (placement and placement.page_size) or _page_size(call, family, plan)
    if plan is None:
        slots, pages = _fresh_slots(rows, page, placement)
    else:
        slots, pages = _planned_slots(rows, _tables(call, family, plan), page)
    layout = LatentPages(page, FP8)
    if pages * layout.page_bytes > MAX_BYTES:
        raise InvalidCall(f"its {family} rows lie on {pages} pages of {page} rows.", rule="P-PLAN")
    cache, scales = layout.empty(pages), _scales(rows, family, plan)
    stored = [from_keys(held.keys, mine, FP8) for held, mine in zip(rows, scales, strict=True)]
    if placement is not None:
        _heat(cache, layout, stored)
    for place, part in zip(slots, stored, strict=True):
        layout.write(cache, place, part)
    # Requests may share pages, of a common prefix; then their rows there are the same.
    for place, held in zip(slots, rows, strict=True):
        if not layout.read(cache, place).keys().same(held.keys):
            raise InvalidCall(f"its launch plan gives two {family} rows one place.", rule="P-PLAN")
    live = [LiveSlots(place, held.first) for place, held in zip(slots, rows, strict=True)]
    lists = _lists(call.selection.families[family])
    table = to_physical(lists, call.rows.request, live, _width(call, family, plan, lists))
    return FamilyCache(cache, page, table.astype(np.int64))


def smallest_scales(values: Array, group: int) -> Array:
    """Return the smallest UE8M0 scales under which rows fit, uint8 `[N, n / group]`.

    Values that have codes under some scale have them under this one too: a smaller step holds them all.

    Args:
        values: float64 `[N, n]`.
        group: values of one scale.
    """
    groups = (len(values), values.shape[1] // group, group)
    size = np.where(np.isfinite(values), np.abs(values), 0.0).reshape(groups)
    # The largest code is 448 = 0.875 * 2^9.
    fraction, exponent = np.frexp(size.max(axis=2))
    return np.asarray(np.clip(exponent - 9 + (fraction > 0.875) + 127, 1, 254), np.uint8)


def detail(call: AttentionCall, name: str, default: int, limit: int) -> int:
    """Return a number that the recorder noted beside a call, for a launch without its plan."""
    text = call.provenance.details.get(name, "")
    number = int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0
    return number if 1 <= number <= limit else default


def storage_scales(parts: Sequence[LatentStorage]) -> Array:
    """Return the scales of rows as a plan keeps them, uint8 `[N, 7]`: with them the bytes come back."""
    return np.concatenate([np.zeros((0, SCALES), np.uint8), *(part.nope.scales for part in parts)])


def _page_size(call: AttentionCall, family: KVFamily, plan: LaunchPlan | None) -> int:
    recent = family is KVFamily.RECENT
    if plan is not None:
        given = plan.page_size if recent else plan.scalars.get("compressed_page")
        if type(given) is not int or not 1 <= given <= MAX_PAGE:
            raise InvalidCall(f"its launch plan has {family} pages of {given} rows.", rule="P-PLAN")
        return given
    name, default = ("window_page", WINDOW_PAGE) if recent else ("compressed_page", BLOCK // family.ratio)
    return detail(call, name, default, MAX_PAGE)


def _width(call: AttentionCall, family: KVFamily, plan: LaunchPlan | None, lists: Lists) -> int:
    """The columns of the slot table: they decide how many keys the operator takes at once."""
    name = "window_width" if family is KVFamily.RECENT else "compressed_width"
    longest = int(np.diff(lists.offsets).max(initial=0))
    if plan is None:
        return max(detail(call, name, longest, MAX_WIDTH), longest, 1)
    given = plan.scalars.get(name)
    if type(given) is not int or not max(1, longest) <= given <= MAX_WIDTH:
        raise InvalidCall(f"its launch plan has {given} columns for {longest} {family} rows.", rule="P-PLAN")
    return given


def _tables(call: AttentionCall, family: KVFamily, plan: LaunchPlan) -> list[Array]:
    if family is KVFamily.RECENT:
        tables = list(plan.block_tables)
    else:
        array = plan.arrays.get("compressed_tables")
        if array is None or array.dtype != np.int32 or array.ndim != 2:
            raise InvalidCall("its launch plan lacks the pages of compressed rows.", rule="P-PLAN")
        tables = list(array)
    if len(tables) != len(call.rows.requests):
        raise InvalidCall("its launch plan is about another number of requests.", rule="P-PLAN")
    return tables


def _planned_slots(rows: list[KVRows], tables: list[Array], page: int) -> tuple[list[Int64], int]:
    most = max((int(table.max(initial=0)) for table in tables), default=0) + 1
    given = [
        page_slots(table, np.arange(held.first, held.end), page, pages=most)
        for held, table in zip(rows, tables, strict=True)
    ]
    names = np.unique(np.concatenate(given) // page)
    slots = [np.searchsorted(names, slot // page) * page + slot % page for slot in given]
    return slots, max(1, names.size)


def _fresh_slots(rows: list[KVRows], page: int, placement: Placement | None) -> tuple[list[Int64], int]:
    slots, pages = [], 0
    for held in rows:
        skipped = held.first // page
        slots.append(np.arange(held.first, held.end, dtype=np.int64) + (pages - skipped) * page)
        pages += -(-held.end // page) - skipped
    if placement is None:
        return slots, max(1, pages)
    names, total = placement.pages(pages)
    return [names.astype(np.int64)[slot // page] * page + slot % page for slot in slots], total


def _heat(cache: Array, layout: LatentPages, stored: list[LatentStorage]) -> None:
    """Fill every slot with a row of the call, so that a stray read gives another answer."""
    source = max(stored, key=lambda part: len(part.rope.data))
    if not len(source.rope.data):
        return
    slots = np.arange(len(cache) * layout.page_size)
    at = slots[::-1] % len(source.rope.data)
    nope = replace(source.nope, codes=source.nope.codes.take(at), scales=source.nope.scales[at])
    layout.write(cache, slots, LatentStorage(nope, source.rope.take(at)))


def _scales(rows: list[KVRows], family: KVFamily, plan: LaunchPlan | None) -> list[Array]:
    if plan is None:
        return [smallest_scales(held.keys.to_float64()[:, 0, :CODES], GROUP) for held in rows]
    array = plan.arrays.get("recent_scales" if family is KVFamily.RECENT else "compressed_scales")
    counts = [held.count for held in rows]
    if array is None or array.dtype != np.uint8 or array.shape != (sum(counts), SCALES):
        raise InvalidCall(f"its launch plan lacks the scales of the {family} rows.", rule="P-PLAN")
    return np.split(array, np.cumsum(counts)[:-1])


def _lists(part: Ranges | Lists) -> Lists:
    return part if isinstance(part, Lists) else Lists.of([part.row(t) for t in range(part.rows)])
