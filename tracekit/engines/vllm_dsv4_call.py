"""One launch of DeepSeek-V4's attention in vLLM on the CPU, in the logical words of the model.

Rows are read back from the slots of the two caches that the operator was given, and those slots are what says
which row of the call read which KV row, in which order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tracekit.canonical.fp8_ds_mla import LatentPages, LatentStorage
from tracekit.canonical.paged import page_slots
from tracekit.canonical.selection import LiveSlots, to_logical
from tracekit.canonical.window import live_rows, window_ranges
from tracekit.engines.torch_bits import borrow
from tracekit.engines.vllm_call import engine_name
from tracekit.engines.vllm_points import layer_number
from tracekit.engines.vllm_step import Step
from tracekit.errors import Unsupported
from tracekit.model import (
    Array,
    Bits,
    Conventions,
    DType,
    KVFamily,
    KVSource,
    LaunchPlan,
    Lists,
    Origin,
    Output,
    Provenance,
    Ranges,
    Selection,
    scale_to_bits,
)
from tracekit.providers.vllm_dsv4 import KERNEL, executed
from tracekit.providers.vllm_dsv4_cache import FP8, storage_scales
from tracekit.recorder.observation import Borrowed, Observation, SeenKV

NULL_PAGE = 0
"""vLLM gives block 0 to nobody and fills tables with it."""
_FAMILIES = {family.ratio: family for family in (KVFamily.C4, KVFamily.C128)}


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """The arguments of one `flash_mla_with_kvcache_cpu`, in its order; `out` `[N, H, 512]` is filled."""

    out: torch.Tensor
    q: torch.Tensor
    window_cache: torch.Tensor
    window_slots: torch.Tensor
    window_page: int
    compressed_cache: torch.Tensor
    compressed_slots: torch.Tensor
    compressed_page: int
    sink: torch.Tensor
    scale: float


@dataclass(frozen=True, eq=False)
class _Family:
    """One family of a launch.

    Args:
        rows: the storage of each request's rows.
        firsts: the logical index of each one's first row.
        tables: its pages, from the first row of the request on.
        selection: what each query row read.
    """

    rows: list[LatentStorage]
    firsts: list[int]
    tables: list[Array]
    selection: Ranges | Lists


def observe_launch(
    name: str, layer: Any, launch: OperatorCall, metadata: Mapping[str, Any], step: Step
) -> Observation:
    """Return the logical side of a launch that has run; everything in it is a copy.

    Args:
        name: of the layer.
        layer: gives window, ratio, and the names of its caches.
        launch: what the operator was given.
        metadata: vLLM's attention metadata of the step; gives the block tables.
        step: the rows of the step.

    Raises:
        Unsupported: `V-ROWS`, `V-HOLES`, `V-RATIO`.
        InvalidCall: `C-SEL-PHYSICAL` a slot that is no live row of its request; `C-...` a table or a row that
            cannot be read.
    """
    swa = metadata[layer.swa_cache_layer.prefix]
    rows = step.positions.size
    _check_rows(name, swa, launch, step)
    families = {KVFamily.RECENT: _window(name, layer, launch, swa.block_table, step)}
    ratio = int(layer.compress_ratio)
    if ratio > 1:
        table = metadata[name].block_table
        families[_family(name, ratio)] = _compressed(name, _family(name, ratio), launch, table, step)
    heads = int(layer.n_local_heads)
    out, q = (borrow(t[:rows, :heads], n).data.copy() for t, n in ((launch.out, "out"), (launch.q, "query")))
    plan = _plan(launch, families, step, heads)
    return Observation(
        layer=layer_number(name),
        requests=step.handles,
        request=step.request,
        positions=step.positions,
        q=Bits(q, DType.BFLOAT16),
        kv={
            handle: {
                family: _seen(part, place, step.generations[handle]) for family, part in families.items()
            }
            for place, handle in enumerate(step.handles)
        },
        sink=Bits(borrow(launch.sink[:heads], "sink").data.copy(), DType.FLOAT32),
        selection=Selection({family: part.selection for family, part in families.items()}),
        out=Output(Bits(out, DType.BFLOAT16), Origin.EXECUTED),
        lse=None,
        conventions=Conventions(
            scale_to_bits(launch.scale),
            window=int(layer.window_size),
            output_boundary="before inverse rope",
            probability_dtype=DType.BFLOAT16,
            kv_source=KVSource.CONSUMED,
        ),
        provenance=Provenance(
            engine_name(),
            layer.get_attn_backend().get_name(),
            executed(),
            torch.get_num_threads(),
            {"layer": name} | {k: str(plan.scalars[k]) for k in _DETAILS if k in plan.scalars},
        ),
        launch=plan,
    )


_DETAILS = ("window_page", "window_width", "compressed_page", "compressed_width")
"""What a launch of other rows needs to be one of the same kind."""


def _window(name: str, layer: Any, launch: OperatorCall, tables: torch.Tensor, step: Step) -> _Family:
    window = int(layer.window_size)
    spans = [live_rows(length, new, window) for length, new in lengths(step)]
    part = _read(name, launch.window_cache, launch.window_page, launch.window_slots, tables, spans, step)
    every = window_ranges(step.positions, window)
    return part if not _equal(part.selection, every) else _Family(part.rows, part.firsts, part.tables, every)


def _compressed(
    name: str, family: KVFamily, launch: OperatorCall, tables: torch.Tensor, step: Step
) -> _Family:
    spans = [(0, length // family.ratio) for length, _ in lengths(step)]
    cache, slots = launch.compressed_cache, launch.compressed_slots
    part = _read(name, cache, launch.compressed_page, slots, tables, spans, step)
    visible = (step.positions + 1) // family.ratio
    every = Ranges(np.zeros_like(visible), visible)
    return part if not _equal(part.selection, every) else _Family(part.rows, part.firsts, part.tables, every)


def _read(
    name: str,
    cache: torch.Tensor,
    page: int,
    slots: torch.Tensor,
    tables: torch.Tensor,
    spans: list[tuple[int, int]],
    step: Step,
) -> _Family:
    """Read one family back from its pages: rows `[first, end)` of each request, and who read which."""
    layout, pages = LatentPages(int(page), FP8), int(cache.shape[0])
    memory, given = cache.numpy(), tables.cpu().numpy()
    rows, live = [], []
    for table, (first, end) in zip(given, spans, strict=False):
        at = page_slots(table, np.arange(first, end), int(page), pages=pages, null_page=NULL_PAGE)
        live.append(LiveSlots(at, first))
        rows.append(layout.read(memory, at))
    read = slots.numpy()[: step.positions.size]
    held = read >= 0
    if (held[:, 1:] & ~held[:, :-1]).any():
        raise Unsupported(
            f"layer {name} leaves holes inside its lists of slots, which a selection has no word for.",
            rule="V-HOLES",
            layer=name,
        )
    used = [
        table[: -(-end // int(page))].astype(np.int32) for table, (_, end) in zip(given, spans, strict=False)
    ]
    return _Family(rows, [first for first, _ in spans], used, to_logical(read, step.request, live))


def _equal(lists: Ranges | Lists, every: Ranges) -> bool:
    """Whether lists are the ranges, in ascending order: what most launches read."""
    return lists.rows == every.rows and all(
        np.array_equal(lists.row(t), every.row(t)) for t in range(every.rows)
    )


def lengths(step: Step) -> list[tuple[int, int]]:
    """Tokens of each request with this step's, and how many are this step's."""
    counts = np.bincount(step.request, minlength=len(step.handles))
    ends = [int(step.positions[step.request == place].max()) + 1 for place in range(len(step.handles))]
    return list(zip(ends, counts.tolist(), strict=True))


def _seen(part: _Family, place: int, generation: int) -> SeenKV:
    keys = part.rows[place].keys()
    return SeenKV(Borrowed(keys.data.transpose(1, 0, 2), keys.dtype), None, part.firsts[place], generation)


def _check_rows(name: str, swa: Any, launch: OperatorCall, step: Step) -> None:
    """The operator's rows must be those of the model's input."""
    rows = step.positions.size
    owners = swa.token_to_req_indices.cpu().numpy()[:rows]
    if launch.q.shape[0] < rows or not np.array_equal(owners, step.request):
        raise Unsupported(
            f"layer {name} was launched for {launch.q.shape[0]} rows of requests {owners.tolist()[:6]}, "
            f"which are not the {rows} rows of the model's input.",
            rule="V-ROWS",
            layer=name,
        )


def _family(name: str, ratio: int) -> KVFamily:
    if ratio not in _FAMILIES:
        raise Unsupported(
            f"layer {name} makes one row of {ratio} tokens; traces know rows of "
            f"{' and '.join(map(str, _FAMILIES))} tokens (c4, c128).",
            rule="V-RATIO",
            layer=name,
            ratio=ratio,
        )
    return _FAMILIES[ratio]


def _plan(launch: OperatorCall, families: Mapping[KVFamily, _Family], step: Step, heads: int) -> LaunchPlan:
    recent = families[KVFamily.RECENT]
    rows, slots = step.positions.size, int(launch.q.shape[0])
    counts = np.bincount(step.request, minlength=len(step.handles))
    scalars: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "window_page": int(launch.window_page),
        "window_width": int(launch.window_slots.shape[1]),
        "window_pages": int(launch.window_cache.shape[0]),
    }
    arrays: dict[str, Array] = {"recent_scales": storage_scales(recent.rows)}
    for family in families.keys() - {KVFamily.RECENT}:
        part = families[family]
        table = np.full((len(part.tables), max(map(len, part.tables))), -1, np.int32)
        for row, pages in zip(table, part.tables, strict=True):
            row[: pages.size] = pages
        arrays |= {"compressed_scales": storage_scales(part.rows), "compressed_tables": table}
        scalars |= {
            "compressed_page": int(launch.compressed_page),
            "compressed_width": int(launch.compressed_slots.shape[1]),
            "compressed_pages": int(launch.compressed_cache.shape[0]),
        }
    return LaunchPlan(
        KERNEL,
        np.arange(rows),
        slots,
        head_padding=int(launch.q.shape[1]) - heads,
        page_size=int(launch.window_page),
        block_tables=tuple(recent.tables),
        cu_seqlens=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        scalars=scalars,
        arrays=arrays,
    )
