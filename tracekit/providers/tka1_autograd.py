"""TKA-1 in torch's graph: a forward with the same bits whether gradients are wanted or not, and its backward.

Tensors are packed rows, as kernels of training take them; a `Layout` says which rows belong together.
Gradients are computed in binary32 (docs/tka1.md, S16) and rounded once, to nearest even, to the dtype of
their tensor.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from tracekit.model import Array, Bits, DType, scale_to_bits
from tracekit.providers import tka1
from tracekit.providers.torch_tensors import from_torch, to_torch, torch_dtype

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Layout:
    """Which packed rows are queries, and which rows of K and V they see.

    Args:
        rows: int64 `[T]`, the rows of q that are queries; elsewhere O and LSE are zero, and dO is not read.
        request: int32 `[T]`, the request of each query.
        positions: int64 `[T]`, its position in it.
        held: per request int64 `[N]`, its rows of k and v, ascending by row id from 0.
        selection: the row ids that each query sees.
        scale: factor on q.k.
    """

    rows: I64
    request: npt.NDArray[np.int32]
    positions: I64
    held: tuple[I64, ...]
    selection: tka1.Ranges | tka1.Lists
    scale: float


def packed(lengths: tuple[int, ...], scale: float, window: int | None = None) -> Layout:
    """Return the layout of whole sequences one behind the other, causal, the queries being all rows.

    Args:
        lengths: rows of each sequence.
        scale: factor on q.k.
        window: rows that a query sees at most, its own counted.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    positions = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
    low = np.zeros_like(positions) if window is None else np.maximum(positions + 1 - window, 0)
    return Layout(
        np.arange(starts[-1]),
        np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        positions,
        tuple(np.arange(a, b) for a, b in itertools.pairwise(starts)),
        tka1.Ranges(low, positions + 1),
        scale,
    )


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    layout: Layout,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return O `[S, H, Dv]` and the LSE, FP32 `[S, H]`, natural, the sink not counted; O is differentiable.

    The gradient of the sink is summed over requests in the order of the layout, for tensors carry no other
    name of a request.

    Args:
        q: `[S, H, D]`, bfloat16, float16 or float32.
        k: `[N, Hkv, D]`, of the same dtype.
        v: `[N, Hkv, Dv]`, or None where keys and values are one tensor; its gradient is then dK + dV.
        layout: which rows belong together.
        sink: `[H]` logits that join the denominator.

    Raises:
        InvalidCall: as `tka1.Inputs`.
        Unsupported: `P-DTYPE` for a dtype that is not taken.
    """
    out, lse = _Attention.apply(q, k, v, sink, layout)  # type: ignore[no-untyped-call]
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        sink: torch.Tensor | None,
        layout: Layout,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = _inputs(q, k, v, sink, layout)
        if any(ctx.needs_input_grad):
            answer, ctx.before = tka1.training(inputs)
        else:
            answer = tka1.attention(inputs)
        ctx.save_for_backward(q, k, v, sink)
        ctx.layout = layout
        out = to_torch(Bits(_placed(answer.out, layout.rows, len(q)), inputs.dtype))
        lse = to_torch(Bits(_placed(answer.lse, layout.rows, len(q)), DType.FLOAT32))
        out, lse = out.to(q.device), lse.to(q.device)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sink = ctx.saved_tensors
        layout: Layout = ctx.layout
        data, dtype = from_torch(d_out, "the gradient of O")
        grads = tka1.backward(
            tka1.Backward(
                _inputs(q, k, v, sink, layout),
                layout.positions,
                np.ascontiguousarray(data[layout.rows]),
                dtype,
                ctx.before,
            )
        )
        (family,) = grads.families
        d_sink = None
        if sink is not None and grads.d_sink is not None:
            d_sink = _rounded(tka1.sum_of_sinks(grads.d_sink, range(len(grads.d_sink))), sink)
        return (
            _rounded(_placed(grads.d_q, layout.rows, len(q)), q),
            _rounded(_gathered(family.keys, layout, len(k)), k),
            None if v is None else _rounded(_gathered(family.values, layout, len(v)), v),
            d_sink,
            None,
        )


def _inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    sink: torch.Tensor | None,
    layout: Layout,
) -> tka1.Inputs:
    data, dtype = from_torch(q.detach(), "q")
    keys = _held(k, layout)
    bits = None if sink is None else Bits(*from_torch(sink.detach(), "the sink")).to_float32().view(np.uint32)
    family = tka1.FamilyInput(
        keys, keys if v is None else _held(v, layout), (0,) * len(keys), layout.selection
    )
    return tka1.Inputs(
        q=np.ascontiguousarray(data[layout.rows]),
        request=layout.request,
        families=(family,),
        sink=bits,
        scale_bits=scale_to_bits(layout.scale),
        dtype=dtype,
    )


def _held(tensor: torch.Tensor, layout: Layout) -> tuple[Array, ...]:
    data = from_torch(tensor.detach(), "KV")[0]
    return tuple(np.ascontiguousarray(data[rows]) for rows in layout.held)


def _placed(rows: Array, at: I64, count: int) -> Array:
    """Rows in their places among `count`, zeros elsewhere."""
    whole = np.zeros((count, *rows.shape[1:]), rows.dtype)
    whole[at] = rows
    return whole


def _gathered(parts: tuple[Array, ...], layout: Layout, count: int) -> Array:
    whole = np.zeros((count, *parts[0].shape[1:]), np.uint32)
    for rows, part in zip(layout.held, parts, strict=True):
        whole[rows] = part
    return whole


def _rounded(bits: Array, like: torch.Tensor) -> torch.Tensor:
    """Binary32 bits as a tensor in the dtype and on the device of another."""
    dtype = next(one for one in tka1.DTYPES if torch_dtype(one) is like.dtype)
    rounded = Bits.from_float32(Bits(bits, DType.FLOAT32).to_float32(), dtype)
    return to_torch(rounded).to(like.device)
