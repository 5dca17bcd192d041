"""`vllm-triton`: vLLM's unified attention in Triton, without an engine: pages, windows, sinks.

Written against vLLM 0.32.0, `vllm.v1.attention.ops.triton_unified_attention`; a test holds the signature
against the installed source and runs the kernel in Triton's interpreter. Without the buffers of its 3D form
the 2D one runs, whatever the batch; what vLLM chooses for decodes differs in bits. No LSE. vLLM documents
no promise of this function, so nothing is advertised. Not run on hardware yet.
"""

import torch

from tracekit.model import AttentionCall
from tracekit.providers.base import Tensors
from tracekit.providers.gpu_batch import answer, paged, sink_of, window_of
from tracekit.providers.gpu_kernel import GpuKernel, load

TARGET = "vllm.v1.attention.ops.triton_unified_attention:unified_attention"
ARGUMENTS = (
    *("q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale"),
    *("causal", "window_size", "block_table", "softcap", "q_descale", "k_descale", "v_descale", "sinks"),
)
PAGE_SIZE = 16


class VllmTriton(GpuKernel):
    """`unified_attention`, its 2D form."""

    id = "vllm-triton"
    kernel = "vllm.triton_unified_2d"
    distribution = "vllm"
    sink = True
    lse = False

    def _load(self) -> None:
        self._function = load(type(self), TARGET, ARGUMENTS)

    def _run(self, call: AttentionCall) -> Tensors:
        batch = paged(call, PAGE_SIZE, self.device)
        out = torch.empty_like(batch.q)
        self._function(
            q=batch.q,
            k=batch.keys,
            v=batch.values,
            out=out,
            cu_seqlens_q=batch.starts,
            max_seqlen_q=batch.longest_q,
            seqused_k=batch.lengths,
            max_seqlen_k=batch.longest_k,
            softmax_scale=call.conventions.scale,
            causal=True,
            window_size=window_of(call),
            block_table=batch.tables,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            sinks=sink_of(call, self.device),
        )
        return answer(call, out)
