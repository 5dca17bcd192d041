"""`flashinfer`: FlashInfer's paged prefill, with the split of keys fixed.

Written against FlashInfer 0.6.18 (flashinfer-ai/flashinfer, fb28d72 of 2026-08-22),
`BatchPrefillWithPagedKVCacheWrapper`, backend fa2, layout NHD. LSE in base 2, `[T, H]`. `plan` says of
`fixed_split_size` that it makes the merge deterministic "and therefore batch-size invariant outputs", so
`rerun`, `requests` and `subbatch` are advertised, and the size is fixed. Sinks are refused. Not run on
hardware yet.
"""

from typing import Any

import torch

from tracekit.model import AttentionCall
from tracekit.providers.base import Tensors
from tracekit.providers.gpu_batch import answer, paged, window_of
from tracekit.providers.gpu_kernel import GpuKernel, load

PAGE_SIZE = 16
SPLIT = 64
"""Pages of a piece of keys: 1,024 rows."""

_WORKSPACE = 128 << 20

PLAN = (
    *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads"),
    *("num_kv_heads", "head_dim_qk", "page_size", "causal", "sm_scale", "window_left", "q_data_type"),
    "fixed_split_size",
)
RUN = ("q", "paged_kv_cache", "return_lse")


class FlashInfer(GpuKernel):
    """`BatchPrefillWithPagedKVCacheWrapper`, planned anew for each launch."""

    id = "flashinfer"
    kernel = "flashinfer.paged_prefill"
    distribution = "flashinfer-python"
    promises = frozenset({"rerun", "requests", "subbatch"})

    def _load(self) -> None:
        target = "flashinfer:BatchPrefillWithPagedKVCacheWrapper"
        self._wrapper: Any = load(type(self), target, ("float_workspace_buffer", "kv_layout", "backend"))
        load(type(self), f"{target}.plan", PLAN)
        load(type(self), f"{target}.run", RUN)

    def _run(self, call: AttentionCall) -> Tensors:
        batch = paged(call, PAGE_SIZE, self.device)
        counts = (batch.lengths + PAGE_SIZE - 1) // PAGE_SIZE
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        pages = torch.cat([table[:n] for table, n in zip(batch.tables, counts.tolist(), strict=True)])
        workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=self.device)
        wrapper = self._wrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(
            batch.starts,
            indptr,
            pages.int(),
            (batch.lengths - (counts - 1) * PAGE_SIZE).int(),
            call.num_heads,
            call.num_kv_heads,
            call.head_dim,
            PAGE_SIZE,
            causal=True,
            sm_scale=call.conventions.scale,
            window_left=window_of(call)[0],
            q_data_type=batch.q.dtype,
            fixed_split_size=SPLIT,
        )
        out, lse = wrapper.run(batch.q, (batch.keys, batch.values), return_lse=True)
        return answer(call, out, lse, base2=True)
