"""TKA-1 as vLLM's attention backend on the CPU: the same pages, tables and batches, another kernel.

vLLM's CPU platform always takes the entry CPU_ATTN of its registry, so that entry is exchanged before an
engine is made; `TRACEKIT_BACKEND=tka1` has the plug-in do it in every process of vLLM. Writing the cache and
planning launches stay vLLM's own. Only `forward` is another one: rows are read back from the pages that the
block table names, and what each row reads is given to TKA-1 in logical words. So its answer depends on no
page, chunk or batch.
"""

from typing import Any

import numpy as np
import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from tracekit.canonical.window import live_rows, window_ranges
from tracekit.engines.torch_bits import borrow, widened
from tracekit.engines.vllm_pages import PagedCache, cache_of
from tracekit.errors import Unsupported
from tracekit.model import Array, Bits, DType, scale_to_bits
from tracekit.providers import tka1
from tracekit.providers.portable import Tka1
from tracekit.providers.torch_tensors import to_torch, torch_dtype

DTYPES = tuple(torch_dtype(dtype) for dtype in tka1.DTYPES)
"""Dtypes of a model on TKA-1."""


def register() -> None:
    """Let engines that are made from now on run TKA-1; again and again does no harm."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{Tka1Backend.__name__}")
    _cached_get_attn_backend.cache_clear()


def unregister() -> None:
    """Let engines that are made from now on run vLLM's own kernel again."""
    AttentionBackendEnum.CPU_ATTN.clear_override()
    _cached_get_attn_backend.cache_clear()


class Tka1Impl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """One layer's attention by TKA-1.

    Raises:
        Unsupported: `V-TKA1`, when it is made, for a layer that TKA-1 does not compute.
    """

    identity = Tka1().identity()
    """What runs, for a recorder: the version of the definition and nothing else."""

    lse: Bits | None = None
    """LSE FP32 `[N, H]` of the last launch, natural, sink not counted; vLLM has no place for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kind = getattr(self.attn_type, "value", self.attn_type)
        dtype = get_current_vllm_config().model_config.dtype
        checks = (
            (self.alibi_slopes is not None, "uses ALiBi"),
            (bool(self.logits_soft_cap), f"caps its scores softly at {self.logits_soft_cap}"),
            (kind != "decoder", f"is {kind} attention"),
            (dtype not in DTYPES, f"runs in {dtype}"),
        )
        for wrong, what in checks:
            if wrong:
                raise _refused(f"a layer {what}")

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fill `output`; arguments and result as `CPUAttentionBackendImpl.forward`.

        Raises:
            Unsupported: `V-TKA1` for a launch that TKA-1 does not compute, `V-FP8` for stored values that
                are not exact in the dtype of the model.
        """
        if attn_metadata is None:  # profiling, over no cache
            return output
        if output_scale is not None or output_block_scale is not None:
            raise _refused("a launch quantises its output")
        if not attn_metadata.causal or attn_metadata.dynamic_causal is not None:
            raise _refused("a launch is not causal")
        rows = int(attn_metadata.num_actual_tokens)
        q = borrow(query[:rows], "query")
        answer = tka1.attention(
            launch(
                q.data,
                cache_of(layer, self, kv_cache, layer.isa, query.dtype),
                starts=attn_metadata.query_start_loc.cpu().numpy(),
                lengths=attn_metadata.seq_lens.cpu().numpy(),
                tables=attn_metadata.block_table.cpu().numpy(),
                window=self.sliding_window if self.sliding_window > 0 else None,
                sink=None if self.sinks is None else widened(self.sinks, "sinks").data,
                scale=self.scale,
                dtype=q.dtype,
            )
        )
        out = to_torch(Bits(answer.out, q.dtype))
        output[:rows] = out.reshape(output[:rows].shape).to(output.device)
        self.lse = Bits(answer.lse, DType.FLOAT32)
        return output


class Tka1Backend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's backend for the CPU with another implementation; it has the same name, for vLLM asks for it."""

    @staticmethod
    def get_impl_cls() -> type[Tka1Impl]:
        """Return the implementation."""
        return Tka1Impl


def launch(
    q: Array,
    cache: PagedCache,
    *,
    starts: Array,
    lengths: Array,
    tables: Array,
    window: int | None,
    sink: Array | None,
    scale: float,
    dtype: DType,
) -> tka1.Inputs:
    """Return a paged launch of vLLM in the words of TKA-1.

    Args:
        q: bits `[N, H, D]`, the rows of all requests one after the other.
        cache: of the layer.
        starts: `[R + 1]`, the first row of each request.
        lengths: `[R]`, tokens of each request with those of this launch.
        tables: `[R, W]`, pages.
        window: w, a row's own position included, or None.
        sink: binary32 bits `[H]`, or None.
        scale: the factor on q.k.
        dtype: of q, and of O.

    Raises:
        InvalidCall: `C-PAGE-...` when a table gives a row no page of its own.
        Unsupported: `V-FP8`.
    """
    counts = np.diff(starts).astype(np.int64)
    request = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    positions = np.arange(len(q)) - np.repeat(starts[1:], counts) + np.repeat(lengths, counts)
    keys, values, first = [], [], []
    for count, length, table in zip(counts, lengths, tables, strict=True):
        lo, hi = live_rows(int(length), int(count), window)
        k, v = cache.values(cache.rows(table, lo, hi), dtype)
        keys.append(np.ascontiguousarray(k.transpose(1, 0, 2)))
        values.append(np.ascontiguousarray(v.transpose(1, 0, 2)))
        first.append(lo)
    ranges = window_ranges(positions, window)
    family = tka1.FamilyInput(
        tuple(keys), tuple(values), tuple(first), tka1.Ranges(ranges.lo.copy(), ranges.hi.copy())
    )
    return tka1.Inputs(q, request, (family,), sink, scale_to_bits(scale), dtype)


def _refused(what: str) -> Unsupported:
    return Unsupported(
        f"TRACEKIT_BACKEND=tka1: {what}, which TKA-1 does not compute (bfloat16, float16 or "
        "float32; causal, windows and sinks); "
        "unset TRACEKIT_BACKEND to run vLLM's own kernel.",
        rule="V-TKA1",
    )
