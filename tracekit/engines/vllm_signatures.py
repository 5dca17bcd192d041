"""vLLM's attention implementations for GPUs: what of their signatures is relied on, and how it is read.

FlashAttention, FlashInfer and Triton are called as the implementation for the CPU is, over caches of one
logical shape, `[blocks, Hkv, page_size, 2 * D]`, key and value of a row side by side; the strides say whether
heads or rows lie first. All of this was taken from their sources (vLLM 0.32) and is untested on hardware.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tracekit.canonical.page_layout import Order, PageLayout, Place
from tracekit.canonical.paged import gather
from tracekit.engines.torch_bits import borrow
from tracekit.errors import Unsupported
from tracekit.model import Array

_NULL_PAGE = 0
_BACKENDS = "vllm.v1.attention.backends"


@dataclass(frozen=True)
class Signature:
    """What of an implementation is relied on.

    Args:
        backend: vLLM's name.
        kernel: how a trace names it.
        metadata: class of `attn_metadata`, and the fields that are read.
        own: attributes of the implementation that are read.
    """

    backend: str
    kernel: str
    metadata: tuple[str, frozenset[str]]
    own: frozenset[str]


_OWN = frozenset({"scale", "sliding_window", "sinks", "alibi_slopes", "logits_soft_cap", "kv_cache_dtype"})
_BATCH = frozenset({"num_actual_tokens", "query_start_loc", "seq_lens", "block_table", "causal"})
_PARTS = frozenset({"num_actual_tokens", "num_decodes", "num_decode_tokens", "decode", "prefill", "causal"})

SIGNATURES: Mapping[tuple[str, str], Signature] = {
    (f"{_BACKENDS}.flash_attn", "FlashAttentionImpl"): Signature(
        "FLASH_ATTN", "vllm.flash_attn", ("FlashAttentionMetadata", _BATCH), _OWN
    ),
    (f"{_BACKENDS}.triton_attn", "TritonAttentionImpl"): Signature(
        "TRITON_ATTN", "vllm.triton_attn", ("TritonAttentionMetadata", _BATCH), _OWN
    ),
    (f"{_BACKENDS}.flashinfer", "FlashInferImpl"): Signature(
        "FLASHINFER", "vllm.flashinfer", ("FlashInferMetadata", _PARTS), _OWN
    ),
}
"""Module and class of an implementation -> its signature."""

FORWARD = (
    "self",
    "layer",
    "query",
    "key",
    "value",
    "kv_cache",
    "attn_metadata",
    "output",
    "output_scale",
    "output_block_scale",
)
"""Arguments of `forward`, which all of them share."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The requests of a launch.

    Args:
        starts: int32 `[R + 1]`, the first row of each.
        lengths: int32 `[R]`, tokens of each, those of this launch included.
        tables: int32 `[R]` of `[pages]`.
    """

    starts: Array
    lengths: Array
    tables: tuple[Array, ...]


def signature_of(impl: Any) -> Signature | None:
    """Return the signature of an implementation, or None where it is none of these."""
    bases = ((base.__module__, base.__name__) for base in type(impl).__mro__)
    return next((SIGNATURES[base] for base in bases if base in SIGNATURES), None)


def page_layout(shape: tuple[int, ...], head_dim: int) -> PageLayout:
    """Return the layout of a cache of logical shape `[blocks, Hkv, page_size, 2 * D]`, whatever its strides.

    Raises:
        Unsupported: `V-CACHE` for another shape, such as one with scales between the rows.
    """
    if len(shape) != 4 or shape[3] != 2 * head_dim:
        raise Unsupported(
            f"a cache of shape {list(shape)} is not [blocks, heads, page, {2 * head_dim}]; rows with scales "
            "between them are not read.",
            rule="V-CACHE",
            shape=list(shape),
        )
    return PageLayout(shape[2], shape[1], head_dim, place=Place.JOINED, order=Order.HND)


def read_rows(cache: torch.Tensor, head_dim: int, table: Array, first: int, end: int) -> tuple[Array, Array]:
    """Return keys and values `[N, Hkv, D]` of rows `[first, end)`; only their pages are copied to the host.

    Raises:
        InvalidCall: `C-PAGE-...`, a table gives a row no page of its own.
        Unsupported: `V-CACHE`.
    """
    layout = page_layout(tuple(cache.shape), head_dim)
    places = np.arange(first // layout.page_size, -(-end // layout.page_size))
    wanted = np.asarray(table, np.int64)[places[places < len(table)]]
    inside = wanted[(wanted >= 0) & (wanted < cache.shape[0])]
    # The pages that are read get numbers of their own; the null page is one of them, and is refused below.
    used = np.unique(np.append(inside, _NULL_PAGE))
    host = borrow(cache[torch.from_numpy(used).to(cache.device)].cpu(), "the cache").data
    near = np.asarray(table, np.int64)
    near = np.where(np.isin(near, used), np.searchsorted(used, near), -1)
    keys, values = gather(host, layout, near, first, end, null_page=_NULL_PAGE)
    assert values is not None
    return keys, values


def batch_of(metadata: Any) -> Batch:
    """Return the requests of a launch of FlashAttention or Triton."""
    tables = _host(metadata.block_table)
    return Batch(_host(metadata.query_start_loc), _host(metadata.seq_lens), tuple(tables))


def flashinfer_batch(metadata: Any) -> Batch:
    """Return the requests of a launch of FlashInfer: decodes in front, prefills behind.

    Raises:
        Unsupported: `V-FLASHINFER` where a part keeps its tables inside a wrapper of FlashInfer.
    """
    counts: list[int] = []
    lengths: list[int] = []
    tables: list[Array] = []
    for name in ("decode", "prefill"):
        part = getattr(metadata, name)
        if part is None:
            continue
        if not hasattr(part, "block_tables"):
            raise Unsupported(
                f"the {name} part of a launch is planned inside FlashInfer's {type(part).__name__}, which "
                "does not show its tables; record with the trtllm kernels, or with another backend.",
                rule="V-FLASHINFER",
                part=name,
            )
        count = len(part.seq_lens)
        if name == "decode":
            counts += [int(metadata.num_decode_tokens) // max(int(metadata.num_decodes), 1)] * count
        else:
            counts += np.diff(_host(part.cum_seq_lens_q)).tolist()
        lengths += _host(part.seq_lens).tolist()
        tables += list(_host(part.block_tables))
    starts = np.cumsum([0, *counts]).astype(np.int32)
    return Batch(starts, np.array(lengths, np.int32), tuple(tables))


def _host(tensor: torch.Tensor) -> Array:
    return tensor.detach().cpu().numpy().astype(np.int32)
