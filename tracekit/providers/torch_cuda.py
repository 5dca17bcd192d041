"""torch's three attention kernels for GPUs: `torch-flash-cuda`, `torch-efficient-cuda`, `torch-cudnn`.

Written against torch 2.13; `SCHEMAS` is held against the installed torch by a test. Not run on hardware
yet. torch documents no promise about batches, and its list of nondeterministic operations
(`torch.use_deterministic_algorithms`) names no forward of these: so `rerun` alone is advertised.
"""

from collections.abc import Mapping

import torch

from tracekit.model import AttentionCall, DType
from tracekit.providers.base import Tensors
from tracekit.providers.gpu_batch import answer, packed, window_of
from tracekit.providers.gpu_kernel import GpuKernel
from tracekit.providers.torch_batch import from_batch, padded_batch

SCHEMAS: Mapping[str, tuple[str, ...]] = {
    "_flash_attention_forward": (
        *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"),
        *("return_debug_mask", "scale", "window_size_left", "window_size_right"),
    ),
    "_scaled_dot_product_efficient_attention": (
        *("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "scale"),
    ),
    "_scaled_dot_product_cudnn_attention": (
        *("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"),
        *("return_debug_mask", "scale"),
    ),
}
"""Operator of `torch.ops.aten` -> the arguments that are passed."""


class TorchFlash(GpuKernel):
    """What `scaled_dot_product_attention` calls flash attention, over packed rows of varying length.

    SDPA's own operator takes one length for a batch; `_flash_attention_forward` is the same kernel and takes
    cumulative lengths, causal aligned to the last key. LSE natural, `[H, T]`, or `[S, H, longest]`.
    """

    id = "torch-flash-cuda"
    kernel = "torch.flash_cuda"
    promises = frozenset({"rerun"})

    def _run(self, call: AttentionCall) -> Tensors:
        batch = packed(call, self.device)
        left, right = window_of(call)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *batch.arguments,
            0.0,
            True,
            False,
            scale=call.conventions.scale,
            window_size_left=None if left < 0 else left,
            window_size_right=None if left < 0 else right,
        )
        return answer(call, out, unpadded(lse, batch.starts_q))


class TorchEfficient(GpuKernel):
    """SDPA's memory-efficient kernel over a padded batch with a mask; LSE natural, `[B, H, S]`, S padded."""

    id = "torch-efficient-cuda"
    kernel = "torch.efficient_cuda"
    dtypes = frozenset({DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32})
    promises = frozenset({"rerun"})

    def _run(self, call: AttentionCall) -> Tensors:
        batch = padded_batch(call, self.device)
        mask = batch.mask.expand(-1, call.num_heads, -1, -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            batch.q, batch.k, batch.v, mask, True, 0.0, False, scale=call.conventions.scale
        )
        return from_batch(call, batch, out, lse)


class TorchCudnn(GpuKernel):
    """SDPA's cuDNN kernel over a padded batch with a mask; LSE natural, `[B, H, S]` or `[B, H, S, 1]`."""

    id = "torch-cudnn"
    kernel = "torch.cudnn"
    head_dims = (8, 128)
    promises = frozenset({"rerun"})

    def _run(self, call: AttentionCall) -> Tensors:
        batch = padded_batch(call, self.device)
        mask = batch.mask.expand(-1, call.num_heads, -1, -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            batch.q, batch.k, batch.v, mask, True, 0.0, False, False, scale=call.conventions.scale
        )
        return from_batch(call, batch, out, lse.squeeze(-1) if lse.dim() == 4 else lse)


def unpadded(lse: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the LSE of packed rows `[T, H]`, of `[H, T]` or of `[S, H, longest]`."""
    if lse.dim() == 2:
        return lse.T
    counts = starts.diff().tolist()
    return torch.cat([one[:, :count].T for one, count in zip(lse, counts, strict=True)])
