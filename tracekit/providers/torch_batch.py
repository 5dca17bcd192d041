"""A call as one padded batch of torch's `scaled_dot_product_attention`, with a mask, and the way back."""

from dataclasses import dataclass

import numpy as np
import torch

from tracekit.model import Array, AttentionCall, Bits, DType, Ranges
from tracekit.providers.base import Tensors
from tracekit.providers.torch_tensors import from_torch, over, torch_dtype

_WIDE = 16
"""Memory of a row of the mask is a multiple of so many elements, which kernels for GPUs ask for."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A request an entry, its rows in executed order, shorter requests padded.

    Args:
        q: `[B, H, S, D]`.
        k: `[B, H, N, D]`, KV heads repeated.
        v: `[B, H, N, Dv]`.
        mask: `[B, 1, S, N]`, 0 where a key is seen and -inf elsewhere; padded queries see all keys.
        rows: the rows of each request, in the order of the call.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor
    rows: tuple[Array, ...]


def padded_batch(call: AttentionCall, device: str | torch.device = "cpu") -> Batch:
    """Return a call of one family and ranges as a batch on a device."""
    (family, part), *_ = call.selection.families.items()
    assert isinstance(part, Ranges)
    held = [call.kv[key][family] for key in call.rows.requests]
    where = [np.flatnonzero(call.rows.request == index) for index in range(len(held))]
    queries, keys = max(rows.size for rows in where), max(rows.count for rows in held)
    q = np.zeros((len(held), call.num_heads, queries, call.head_dim), call.q.data.dtype)
    k = np.zeros((len(held), call.num_kv_heads, keys, call.head_dim), q.dtype)
    v = np.zeros((len(held), call.num_kv_heads, keys, call.value_dim), q.dtype)
    hidden = np.zeros((len(held), queries, -(-keys // _WIDE) * _WIDE), np.bool_)
    for index, (rows, kv) in enumerate(zip(where, held, strict=True)):
        q[index, :, : rows.size] = call.q.data[rows].transpose(1, 0, 2)
        k[index, :, : kv.count] = kv.keys.data.transpose(1, 0, 2)
        v[index, :, : kv.count] = kv.value_bits.data.transpose(1, 0, 2)
        ids = kv.first + np.arange(hidden.shape[2])
        hidden[index, : rows.size] = (ids < part.lo[rows, None]) | (ids >= part.hi[rows, None])
    mask = torch.zeros(hidden.shape, dtype=torch_dtype(call.dtype))
    mask.masked_fill_(torch.from_numpy(hidden), -torch.inf)
    repeat = call.num_heads // call.num_kv_heads
    return Batch(
        over(q, call.dtype).to(device),
        over(k, call.dtype).repeat_interleave(repeat, 1).to(device),
        over(v, call.dtype).repeat_interleave(repeat, 1).to(device),
        mask.to(device)[:, None, :, :keys],
        tuple(where),
    )


def from_batch(call: AttentionCall, batch: Batch, out: torch.Tensor, lse: torch.Tensor | None) -> Tensors:
    """Return the answer to a call, rows in its order.

    Args:
        call: the call.
        batch: of the call.
        out: `[B, H, S, Dv]`, whatever its strides.
        lse: FP32 `[B, H, S]`, natural; S may be padded at its end.
    """
    rows = np.concatenate(batch.rows)
    answer = np.zeros((call.num_rows, call.num_heads, call.value_dim), call.dtype.container)
    answer[rows] = _rows_of(out, batch)
    if lse is None:
        return Tensors(Bits(answer, call.dtype), None)
    norm = np.zeros((call.num_rows, call.num_heads), np.uint32)
    norm[rows] = _rows_of(lse[..., None], batch)[..., 0]
    return Tensors(Bits(answer, call.dtype), Bits(norm, DType.FLOAT32))


def _rows_of(tensor: torch.Tensor, batch: Batch) -> Array:
    """`[B, H, S, n]` as `[rows, H, n]`, request after request."""
    bits, _ = from_torch(tensor.contiguous(), "an answer")
    return np.concatenate([bits[i, :, : rows.size].transpose(1, 0, 2) for i, rows in enumerate(batch.rows)])
