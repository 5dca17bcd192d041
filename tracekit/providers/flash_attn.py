"""`flash-attn`: FlashAttention-2 of Dao-AILab, packed rows of varying length.

Written against flash_attn 2.8.4 (Dao-AILab/flash-attention, 0251105 of 2026-08-15): causal is aligned to
the last key; LSE natural, `[H, T]`, given with `return_attn_probs`. Its docstring says "the forward pass is
always deterministic", so `rerun` is advertised. Not run on hardware yet.
"""

from tracekit.model import AttentionCall
from tracekit.providers.base import Tensors
from tracekit.providers.gpu_batch import PACKED, answer, packed, window_of
from tracekit.providers.gpu_kernel import GpuKernel, load

ARGUMENTS = (
    *PACKED,
    *("softmax_scale", "causal", "window_size", "return_attn_probs"),
)


class FlashAttn(GpuKernel):
    """`flash_attn_varlen_func`."""

    id = "flash-attn"
    kernel = "flash_attn.varlen"
    distribution = "flash_attn"
    promises = frozenset({"rerun"})

    def _load(self) -> None:
        self._function = load(type(self), "flash_attn:flash_attn_varlen_func", ARGUMENTS)

    def _run(self, call: AttentionCall) -> Tensors:
        out, lse, _ = self._function(
            *packed(call, self.device).arguments,
            softmax_scale=call.conventions.scale,
            causal=True,
            window_size=window_of(call),
            return_attn_probs=True,
        )
        return answer(call, out, lse.T)
