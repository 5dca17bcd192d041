"""`aiter`: AMD's AITER, packed rows of varying length.

Written against ROCm/aiter e404860 of 2026-08-22, `aiter.ops.mha:flash_attn_varlen_func`: causal is aligned
to the last key, the third number of `window_size` counts sink tokens (0: none); LSE natural, `[H, T]`. Its
docstring says "the forward pass is always deterministic", so `rerun` is advertised. Sinks (`sink_ptr`) have
no documented convention there and are refused. Not run on hardware yet.
"""

from tracekit.model import AttentionCall
from tracekit.providers.base import Tensors
from tracekit.providers.gpu_batch import PACKED, answer, packed, window_of
from tracekit.providers.gpu_kernel import GpuKernel, load

ARGUMENTS = (
    *PACKED,
    *("softmax_scale", "causal", "window_size", "return_lse"),
)


class Aiter(GpuKernel):
    """`flash_attn_varlen_func` of AITER."""

    id = "aiter"
    kernel = "aiter.varlen"
    distribution = "aiter"
    promises = frozenset({"rerun"})

    def _load(self) -> None:
        self._function = load(type(self), "aiter.ops.mha:flash_attn_varlen_func", ARGUMENTS)

    def _run(self, call: AttentionCall) -> Tensors:
        out, lse, *_ = self._function(
            *packed(call, self.device).arguments,
            softmax_scale=call.conventions.scale,
            causal=True,
            window_size=(*window_of(call), 0),
            return_lse=True,
        )
        return answer(call, out, lse.T)
