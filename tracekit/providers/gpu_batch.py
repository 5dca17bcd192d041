"""A call in the words of kernels for GPUs: packed rows of varying length, or pages; and the answer back.

Each run of consecutive positions of a request is a sequence, over that request's rows up to its last one, as
an engine would launch it (`vllm_cpu_launch.fresh`).
"""

from dataclasses import dataclass

import numpy as np
import torch

from tracekit.model import AttentionCall, Bits, DType
from tracekit.providers.base import Tensors
from tracekit.providers.torch_tensors import from_torch, over, to_torch
from tracekit.providers.vllm_cpu_launch import Geometry, fresh, held

_LN2 = 0.6931471805599453


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences one behind the other.

    Args:
        q: `[T, H, D]`.
        k: `[N, Hkv, D]`; rows before a window that the call does not hold are zero.
        v: likewise.
        starts_q: int32 `[S + 1]`.
        starts_k: int32 `[S + 1]`.
        longest_q: rows of the longest sequence.
        longest_k: its KV rows.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts_q: torch.Tensor
    starts_k: torch.Tensor
    longest_q: int
    longest_k: int

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """The first arguments of every kernel over packed rows of varying length, as `PACKED` names them."""
        return self.q, self.k, self.v, self.starts_q, self.starts_k, self.longest_q, self.longest_k


PACKED = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
"""How kernels for packed rows name what all of them take first."""


@dataclass(frozen=True, eq=False)
class Paged:
    """Sequences over pages.

    Args:
        q: `[T, H, D]`.
        keys: `[pages, page_size, Hkv, D]`.
        values: likewise.
        starts: int32 `[S + 1]`.
        lengths: int32 `[S]`, KV rows of each sequence.
        tables: int32 `[S, W]`.
        page_size: rows of a page.
    """

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    page_size: int

    @property
    def longest_q(self) -> int:
        """Rows of the longest sequence."""
        return int(self.starts.diff().max())

    @property
    def longest_k(self) -> int:
        """KV rows of the longest sequence."""
        return int(self.lengths.max())


def packed(call: AttentionCall, device: str) -> Packed:
    """Return the sequences of a call, packed, on a device."""
    at = fresh(call, 1)
    ends = np.cumsum(at.seq_lens)
    shape = (int(ends[-1]), call.num_kv_heads, call.head_dim)
    k, v = np.zeros(shape, call.q.data.dtype), np.zeros(shape, call.q.data.dtype)
    rows = held(call)
    for owner, end, length in zip(at.owners, ends, at.seq_lens, strict=True):
        one, start = rows[owner], end - length
        count = min(one.end, int(length)) - one.first
        k[start + one.first : start + one.first + count] = one.keys.data[:count]
        v[start + one.first : start + one.first + count] = one.value_bits.data[:count]
    starts_k = np.concatenate([[0], ends]).astype(np.int32)
    return Packed(
        to_torch(call.q).to(device),
        over(k, call.dtype).to(device),
        over(v, call.dtype).to(device),
        torch.from_numpy(at.starts.astype(np.int32)).to(device),
        torch.from_numpy(starts_k).to(device),
        int(np.diff(at.starts).max()),
        int(at.seq_lens.max()),
    )


def paged(call: AttentionCall, page_size: int, device: str) -> Paged:
    """Return the sequences of a call over pages, on a device; sequences of a request share its pages."""
    at: Geometry = fresh(call, page_size)
    shape = (at.pages * page_size, call.num_kv_heads, call.head_dim)
    k, v = np.zeros(shape, call.q.data.dtype), np.zeros(shape, call.q.data.dtype)
    start = 0
    for one in held(call):
        k[start + one.first : start + one.end] = one.keys.data
        v[start + one.first : start + one.end] = one.value_bits.data
        start += -(-one.end // page_size) * page_size
    pages = (at.pages, page_size, *shape[1:])
    return Paged(
        to_torch(call.q).to(device),
        over(k.reshape(pages), call.dtype).to(device),
        over(v.reshape(pages), call.dtype).to(device),
        torch.from_numpy(at.starts.astype(np.int32)).to(device),
        torch.from_numpy(at.seq_lens).to(device),
        torch.from_numpy(at.tables).to(device),
        page_size,
    )


def answer(
    call: AttentionCall, out: torch.Tensor, lse: torch.Tensor | None = None, *, base2: bool = False
) -> Tensors:
    """Return an answer in the words of a provider.

    Args:
        call: the call.
        out: `[T, H, Dv]`.
        lse: FP32 `[T, H]`, sink not counted; +inf, which some kernels give for a row without keys, is -inf.
        base2: whether the LSE is a logarithm of base 2.
    """
    bits, _ = from_torch(out.contiguous(), "O")
    if lse is None:
        return Tensors(Bits(bits, call.dtype), None)
    natural = lse.float() * _LN2 if base2 else lse.float()
    natural = torch.where(torch.isposinf(natural), -natural, natural).contiguous()
    return Tensors(Bits(bits, call.dtype), Bits(from_torch(natural, "the LSE")[0], DType.FLOAT32))


def window_of(call: AttentionCall) -> tuple[int, int]:
    """Return (left, right) as flash attention counts them: keys beside a row's own; -1 is no limit."""
    return (-1, -1) if call.conventions.window is None else (call.conventions.window - 1, 0)


def sink_of(call: AttentionCall, device: str) -> torch.Tensor | None:
    """Return the sinks FP32 `[H]`, natural-log logits, or None."""
    return None if call.sink is None else to_torch(call.sink).to(device)
