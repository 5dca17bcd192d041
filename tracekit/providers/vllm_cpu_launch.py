"""The arguments of vLLM's CPU attention operator, rebuilt from a call: pages, tables, lengths.

With a launch plan the very launch is rebuilt. Pages get new numbers, the same ones for pages that were
shared, so that a cache of gigabytes becomes as small as what the launch read; rows that nothing read are
zero. Without a plan (rows permuted, a request alone) each run of consecutive positions becomes a sequence of
its own, as the engine would launch it, over the pages of its request.
"""

import re
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tracekit.model import AttentionCall, KVFamily, KVRows, LaunchPlan, Ranges
from tracekit.providers.padding import front_requests
from tracekit.providers.placement import NULL_PAGE, Padding, Placement

DEFAULT_PAGE = 128
MAX_THREADS = 1024
MAX_HEADS = 4096
ISAS = ("amx", "vec", "vec16", "neon")
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")
_SCALARS: dict[str, type | tuple[type, ...]] = {
    "isa": str,
    "kv_dtype": str,
    "scale": float,
    "sink_dtype": (str, type(None)),
    "plan_window": int,
    "plan_heads": int,
    "plan_bytes": int,
    "threads": int,
}


@dataclass(frozen=True, eq=False)
class Geometry:
    """Where rows and pages lie in one launch.

    Args:
        row_slots: int64 `[T]`, the query slot of each row of the call.
        slots: query slots.
        starts: int32 `[S + 1]`, the first query slot of each sequence.
        seq_lens: int32 `[S]`, KV rows that a sequence sees.
        tables: int32 `[S, W]`, its pages.
        owners: the request (index into `rows.requests`) of each sequence.
        pages: pages of the cache.
        page_size: rows of a page.
    """

    row_slots: npt.NDArray[np.int64]
    slots: int
    starts: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    owners: tuple[int, ...]
    pages: int
    page_size: int


def held(call: AttentionCall) -> list[KVRows]:
    """Return the dense KV rows of each request."""
    return [call.kv[key][KVFamily.DENSE] for key in call.rows.requests]


def not_causal(call: AttentionCall) -> bool:
    """Whether a row reads anything but every key up to its own, or the last `window` of them."""
    part = call.selection.families[KVFamily.DENSE]
    if not isinstance(part, Ranges):
        return True
    end = call.rows.positions + 1
    lo = np.zeros_like(end) if call.conventions.window is None else end - call.conventions.window
    return not (np.array_equal(part.hi, end) and np.array_equal(part.lo, np.maximum(lo, 0)))


def unusable(call: AttentionCall, plan: LaunchPlan) -> str | None:
    """Return why a plan does not describe the launch of its call, in one clause, or None.

    A trace may come from anywhere, and the operator checks nothing: what reaches it is checked here.
    """
    lacking = [name for name in _SCALARS if name not in plan.scalars]
    if plan.page_size is None or plan.cu_seqlens is None or "seq_lens" not in plan.arrays or lacking:
        return f"its launch plan lacks {', '.join(lacking) or 'pages or lengths'}"
    for name, kind in _SCALARS.items():
        if not isinstance(plan.scalars[name], kind):
            return f"its launch plan has {plan.scalars[name]!r} for {name}"
    if not 1 <= int(plan.scalars["threads"] or 0) <= MAX_THREADS:
        return f"its launch plan asks for {plan.scalars['threads']} threads"
    if not 1 <= int(plan.scalars["plan_heads"] or 0) <= MAX_HEADS:
        return f"its launch plan schedules {plan.scalars['plan_heads']} heads"
    if plan.scalars["isa"] not in ISAS or plan.scalars["kv_dtype"] not in KV_DTYPES:
        return f"its launch plan names the path {plan.scalars['isa']}, cache {plan.scalars['kv_dtype']}"
    requests = len(call.rows.requests)
    lengths, starts = plan.arrays["seq_lens"], plan.cu_seqlens
    if lengths.shape != (requests,) or starts.shape != (requests + 1,) or len(plan.block_tables) != requests:
        return "its launch plan is about another number of requests"
    if not 16 <= plan.page_size <= 4096 or plan.page_size % 16:
        return f"its launch plan has pages of {plan.page_size} rows"
    if (
        starts[0] != 0
        or (np.diff(starts) < 1).any()
        or starts[-1] != plan.slots
        or plan.slots > call.num_rows
    ):
        return "its launch plan cuts the query slots in another way than the call has rows"
    owner = np.repeat(np.arange(requests), np.diff(starts))
    position = np.arange(plan.slots) - np.repeat(starts[1:], np.diff(starts)) + lengths[owner]
    if not (
        np.array_equal(owner[plan.row_slots], call.rows.request)
        and np.array_equal(position[plan.row_slots], call.rows.positions)
    ):
        return "its launch plan places rows at other positions than the call"
    for rows, table, length in zip(held(call), plan.block_tables, lengths, strict=True):
        if rows.end < length or table.size * plan.page_size < length or (table < 0).any():
            return "its launch plan has fewer pages, or the call fewer KV rows, than its lengths need"
    if plan.scalars["kv_dtype"] != "auto":
        shape = (sum(rows.count for rows in held(call)), call.num_kv_heads, call.head_dim)
        stored = [plan.arrays.get(name) for name in ("k_storage", "v_storage")]
        if any(array is None or array.shape != shape or array.dtype != np.uint8 for array in stored):
            return "its launch plan lacks the bytes of the FP8 cache"
    return None


def planned(plan: LaunchPlan) -> Geometry:
    """Return the launch that a plan describes; `unusable` must have found nothing."""
    assert plan.page_size is not None
    assert plan.cu_seqlens is not None
    used = [
        table[: -(-int(n) // plan.page_size)]
        for table, n in zip(plan.block_tables, plan.arrays["seq_lens"], strict=True)
    ]
    names, flat = np.unique(np.concatenate(used), return_inverse=True)
    tables = np.zeros((len(used), max(table.size for table in used)), np.int32)
    at = 0
    for row, table in zip(tables, used, strict=True):
        row[: table.size] = flat[at : at + table.size]
        at += table.size
    return Geometry(
        plan.row_slots,
        plan.slots,
        plan.cu_seqlens.astype(np.int32),
        plan.arrays["seq_lens"].astype(np.int32),
        tables,
        tuple(range(len(used))),
        int(names.size),
        plan.page_size,
    )


def fresh(call: AttentionCall, page_size: int) -> Geometry:
    """Make a launch of a call that has no plan: one sequence a run of consecutive positions."""
    request, positions = call.rows.request, call.rows.positions
    begins = np.flatnonzero(
        np.concatenate([[True], (np.diff(request) != 0) | (np.diff(positions) != 1)])
    ).astype(np.int32)
    starts = np.append(begins, np.int32(call.num_rows))
    owners = tuple(int(request[t]) for t in begins)
    seq_lens = (positions[starts[1:] - 1] + 1).astype(np.int32)
    counts = [-(-rows.end // page_size) for rows in held(call)]
    first = np.cumsum([0, *counts])
    tables = np.zeros((len(owners), max(counts)), np.int32)
    for row, owner in zip(tables, owners, strict=True):
        row[: counts[owner]] = first[owner] + np.arange(counts[owner])
    slots = np.arange(call.num_rows)
    return Geometry(slots, call.num_rows, starts, seq_lens, tables, owners, int(first[-1]), page_size)


def placed(at: Geometry, placement: Placement) -> Geometry:
    """Return a fresh launch with other page numbers, and with slots and requests that hold nothing.

    Empty requests have no row and no KV, and half of them stand in front; their tables, and the ends of all
    tables, name the null page.
    """
    slots, empty = (placement.padding.get(kind, 0) for kind in (Padding.ROWS, Padding.REQUESTS))
    front = front_requests(placement)
    around = (front, empty - front)
    names, total = placement.pages(at.pages)
    needed = -(-at.seq_lens[:, None] // at.page_size)
    tables = np.where(np.arange(at.tables.shape[1]) < needed, names[at.tables], NULL_PAGE).astype(np.int32)
    return replace(
        at,
        slots=at.slots + slots,
        starts=np.pad(at.starts, around, mode="edge"),
        seq_lens=np.pad(at.seq_lens, around),
        tables=np.pad(tables, (around, (0, 0)), constant_values=NULL_PAGE),
        pages=total,
    )


def page_size_of(call: AttentionCall) -> int:
    """Return the page size of the engine that made the call; vLLM's default where it had none."""
    text = call.provenance.details.get("page_size", "")
    size = int(text) if re.fullmatch(r"[0-9]{1,4}", text) else 0
    return size if 16 <= size <= 4096 and size % 16 == 0 else DEFAULT_PAGE
