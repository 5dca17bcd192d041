"""One launch of vLLM's CPU operator: its tensors, the plan that vLLM makes for it, and the call."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tracekit.errors import Unsupported
from tracekit.model import AttentionCall, Bits, LaunchPlan
from tracekit.providers.guarded import Guarded
from tracekit.providers.torch_tensors import from_torch, over, to_torch, torch_dtype
from tracekit.providers.vllm_cpu_cache import CacheKind
from tracekit.providers.vllm_cpu_launch import Geometry
from tracekit.providers.vllm_cpu_ops import operators


def attend(
    call: AttentionCall,
    at: Geometry,
    isa: str,
    kind: CacheKind,
    cache: tuple[torch.Tensor, ...],
    plan: LaunchPlan | None,
    split: bool,
    same_plan: bool,
    memory: Guarded | None = None,
) -> Any:
    """Launch the operator; returns O `[slots, H, D]` as bit patterns.

    With `memory` queries and O lie there, and what is not written before the launch holds its fill.
    """
    q = queries(call, at)
    if memory is not None:
        q[np.setdiff1d(np.arange(at.slots), at.row_slots)] = memory.fill.pattern(call.dtype)
        query = over(memory.held(q, call.dtype, "Q"), call.dtype)
        out = over(memory.empty(q.shape, call.dtype, "O"), call.dtype)
    else:
        query = to_torch(Bits(q, call.dtype))
        out = torch.zeros_like(query)
    starts, lengths, tables = map(torch.from_numpy, (at.starts.copy(), at.seq_lens.copy(), at.tables.copy()))
    scalars = {} if plan is None else plan.scalars
    schedule = planned_by_vllm(call, lengths, starts, isa, kind, split, scalars)
    if same_plan and schedule.numel() != scalars.get("plan_bytes"):
        raise Unsupported(
            f"vLLM plans this launch in {schedule.numel()} bytes here, not {scalars.get('plan_bytes')}: "
            "it deals the work out in another way, as on a processor with other caches.",
            rule="P-PLAN",
        )
    keys, values = cache
    sink = sink_of(call, scalars)
    launch(call, kind, scalars, query, keys, values, out, starts, lengths, tables, schedule, sink)
    return from_torch(out, "out")[0]


def queries(call: AttentionCall, at: Geometry) -> Any:
    """Return the queries of a launch `[slots, H, D]`; slots that belong to no row hold queries of rows."""
    q = call.q.data[np.arange(at.slots) % call.num_rows]
    q[at.row_slots] = call.q.data
    return q


def sink_of(call: AttentionCall, scalars: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the sink in the dtype of the engine that made the call."""
    if call.sink is None:
        return None
    named = scalars.get("sink_dtype") or call.provenance.details.get("sink_dtype") or call.dtype.value
    return to_torch(call.sink).to(torch.bfloat16 if named == "bfloat16" else torch.float32)


def planned_by_vllm(
    call: AttentionCall,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    isa: str,
    kind: CacheKind,
    split: bool,
    scalars: Mapping[str, Any],
) -> torch.Tensor:
    """Return the plan by which the operator deals the work out to threads."""
    window = _window(call)
    plan: torch.Tensor = operators().get_scheduler_metadata(
        lengths.numel(),
        int(scalars.get("plan_heads", call.num_heads) or call.num_heads),
        call.num_kv_heads,
        call.head_dim,
        lengths,
        torch_dtype(call.dtype),
        starts,
        True,
        int(scalars.get("plan_window", window) or window),
        isa,
        split,
        None,
        kind.name,
    )
    return plan


def launch(
    call: AttentionCall,
    kind: CacheKind,
    scalars: Mapping[str, Any],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    schedule: torch.Tensor,
    sink: torch.Tensor | None,
) -> None:
    """Call the operator; the call gives the scale and the window."""
    operators().cpu_attention_with_kv_cache(
        query,
        keys,
        values,
        out,
        starts,
        lengths,
        float(scalars.get("scale") or call.conventions.scale),
        True,
        None,
        _window(call),
        tables,
        0.0,
        schedule,
        sink,
        None,
        kind.k_scale,
        kind.v_scale,
        kind.name,
    )


def _window(call: AttentionCall) -> int:
    return -1 if call.conventions.window is None else call.conventions.window
