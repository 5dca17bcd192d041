"""`vllm-dsv4-cpu`: vLLM's sparse attention of DeepSeek-V4 for the CPU, from its wheel, without an engine.

The operator is `_C::flash_mla_with_kvcache_cpu`. It reads the slots of the window, then those of compressed
rows, 128 at a time, with an online softmax from one block to the next; FP8 rows become BF16 when they are
packed, P meets V in BF16, and the sink scales the result at the end. So the order of a selection decides
bits, and nothing else of a launch does (docs/findings.md).
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tracekit.canonical.fp8_ds_mla import CODES, ROPE
from tracekit.errors import InvalidCall, Unsupported
from tracekit.model import AttentionCall, Bits, DType, ExecutedIdentity, KVFamily, LaunchPlan
from tracekit.providers.base import Answer, Capabilities, Execution, Launch, Tensors, refusal
from tracekit.providers.padding import front_slots, more_heads, real_heads
from tracekit.providers.placement import Layout, Padding, Placement
from tracekit.providers.torch_tensors import from_torch, to_torch
from tracekit.providers.torch_threads import kernel_threads
from tracekit.providers.vllm_cpu_launch import MAX_THREADS
from tracekit.providers.vllm_cpu_ops import executed_operator, operator
from tracekit.providers.vllm_dsv4_cache import FamilyCache, family_cache
from tracekit.verdict import ClaimId

KERNEL = "vllm.flash_mla_cpu"
OPERATOR = "flash_mla_with_kvcache_cpu"
HEAD_DIM = CODES + ROPE
COMPRESSED = frozenset({KVFamily.C4, KVFamily.C128})
PAGE_SIZES = (1, 2, 16, 64, 256)
"""The operator takes any; vLLM's are 64 for the window and C4, and 2 for C128."""


def executed() -> ExecutedIdentity:
    """Return what runs here: library, and the instructions of its matrix products."""
    return executed_operator(KERNEL, "amx" if torch.cpu._is_amx_tile_supported() else "avx512_bf16")


class VllmDsv4:
    """vLLM's attention of DeepSeek-V4 for the CPU."""

    id = "vllm-dsv4-cpu"

    def __init__(self) -> None:
        operator(OPERATOR)

    def capabilities(self) -> Capabilities:
        """Window and compressed rows in one softmax, sinks, lists; no LSE; P meets V in BF16."""
        return Capabilities(
            dtypes=frozenset({DType.BFLOAT16}),
            families=COMPRESSED | {KVFamily.RECENT},
            two_families=True,
            lists=True,
            sink=True,
            lse=False,
            max_head_dim=HEAD_DIM,
            probability_dtype={DType.BFLOAT16: DType.BFLOAT16},
            page_sizes=PAGE_SIZES,
            layouts=(Layout.JOINED_NHD,),
            padding=frozenset({Padding.ROWS, Padding.HEADS}),
        )

    def advertised(self) -> frozenset[ClaimId]:
        """What was found to hold; vLLM promises nothing in writing (docs/findings.md)."""
        batch = {"threads", "requests", "rows", "solo", "subbatch", "chunks", "decode"}
        return frozenset({"rerun", "recorded", "page-ids", "page-size", "padding", *batch})

    def identity(self) -> ExecutedIdentity:
        """What would run here."""
        return executed()

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why it cannot run a call."""
        if reason := refusal(self.capabilities(), call):
            return reason
        families = tuple(call.selection.families)
        if families[0] is not KVFamily.RECENT or len(families) > 2:
            return f"it reads window rows and then compressed ones, not {', '.join(families)}"
        shared = all(rows.shared for held in call.kv.values() for rows in held.values())
        if call.head_dim != HEAD_DIM or call.num_kv_heads != 1 or not shared:
            return f"its rows are keys and values at once, one head of {HEAD_DIM}"
        try:
            self._caches(call)
            self._threads(call)
        except InvalidCall as error:
            return str(error).rstrip(".")
        return None

    def run(self, launch: Launch) -> Answer:
        """Run each call as one launch: the recorded one where the call has its plan, else a fresh one.

        Raises:
            Unsupported: `P-REFUSED`.
        """
        return Answer(tuple(self._run(call, launch.execution) for call in launch.calls), executed())

    def _plan(self, call: AttentionCall) -> LaunchPlan | None:
        """The plan of a call, where it is one of this kernel."""
        return call.launch if call.launch is not None and call.launch.kernel == KERNEL else None

    def _caches(self, call: AttentionCall, placement: Placement | None = None) -> list[FamilyCache]:
        plan = self._plan(call)
        return [family_cache(call, family, plan, placement) for family in call.selection.families]

    def _threads(self, call: AttentionCall) -> int:
        """The threads of the recorded launch."""
        plan = self._plan(call)
        threads = call.provenance.threads if plan is None else plan.scalars.get("threads")
        if type(threads) is not int or not 0 <= threads <= MAX_THREADS:
            raise InvalidCall(f"its launch plan asks for {threads} threads.", rule="P-PLAN")
        return threads

    def _run(self, call: AttentionCall, execution: Execution) -> Tensors:
        if reason := self.refuses(call):
            raise Unsupported(f"{self.id} cannot run this call: {reason}.", rule="P-REFUSED")
        threads = min(execution.threads or self._threads(call), MAX_THREADS)
        plan, placement = self._plan(call), execution.placement
        if placement is not None:
            call = replace(call, launch=None)
            padding = placement.padding
            at, heads = np.arange(call.num_rows) + front_slots(placement), padding.get(Padding.HEADS, 0)
            slots = call.num_rows + padding.get(Padding.ROWS, 0)
            with kernel_threads(threads):
                out = _attend(more_heads(call, heads), self._caches(call, placement), at, slots)
            return Tensors(Bits(out[at][:, real_heads(call, heads)], call.dtype), None)
        at = np.arange(call.num_rows) if plan is None else plan.row_slots
        slots = call.num_rows if plan is None else plan.slots
        with kernel_threads(threads):
            out = _attend(call, self._caches(call), at, slots)
        return Tensors(Bits(out[at], call.dtype), None)


def _attend(call: AttentionCall, caches: list[FamilyCache], at: Any, slots: int) -> Any:
    """Launch the operator; returns O `[slots, H, D]` as bit patterns."""
    # Slots that belong to no row hold queries of rows: nothing may read them.
    q = call.q.data[np.arange(slots) % call.num_rows]
    q[at] = call.q.data
    query = to_torch(Bits(q, call.dtype))
    out = torch.zeros_like(query)
    window = caches[0]
    # Without compressed rows vLLM hands over the window's cache once more, and no slots.
    compressed = caches[1] if len(caches) > 1 else FamilyCache(window.cache, 1, window.slots[:, :0])
    arguments: list[Any] = []
    for part in (window, compressed):
        read = np.full((slots, part.slots.shape[1]), -1, np.int64)
        read[at] = part.slots
        arguments += [torch.from_numpy(part.cache), torch.from_numpy(read), part.page_size]
    sink = torch.full((call.num_heads,), -np.inf) if call.sink is None else to_torch(call.sink)
    operator(OPERATOR)(out, query, *arguments, sink, float(call.conventions.scale))
    return from_torch(out, "out")[0]
