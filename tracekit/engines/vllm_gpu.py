"""vLLM's attention implementations for GPUs, known by their signature and untested on hardware.

FlashAttention, FlashInfer and Triton are called as the implementation for the CPU is, over caches of one
logical shape, `[blocks, Hkv, page_size, 2 * D]`, key and value of a row side by side; the strides say whether
heads or rows lie first. What is read of a launch was taken from their sources (vLLM 0.32), so nothing is
recorded of a layer before one row of it, computed again, fits what is declared (`vllm_check`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tracekit.canonical.page_layout import Order, PageLayout, Place
from tracekit.canonical.paged import gather
from tracekit.canonical.window import live_rows, window_from_left, window_ranges
from tracekit.engines.torch_bits import borrow
from tracekit.engines.vllm_step import Step
from tracekit.errors import Unsupported
from tracekit.model import (
    Array,
    Bits,
    Conventions,
    DType,
    ExecutedIdentity,
    KVFamily,
    KVSource,
    LaunchPlan,
    Origin,
    Output,
    Provenance,
    Selection,
    scale_to_bits,
)
from tracekit.recorder.observation import Borrowed, Observation, SeenKV

EVIDENCE = "by signature, untested on hardware"

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


@dataclass(frozen=True, eq=False)
class GpuCall:
    """The arguments and the answer of one `forward`, as `vllm_call.KernelCall`; `name` is the layer's."""

    name: str
    number: int
    signature: Signature
    impl: Any
    query: torch.Tensor
    kv_cache: torch.Tensor
    metadata: Any
    output: torch.Tensor
    engine: str


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


def observe_gpu(call: GpuCall, step: Step) -> Observation:
    """Return the logical side of a launch that has run; everything in it is a copy.

    Raises:
        Unsupported: the launch does something that a trace cannot say, or that its signature does not tell.
    """
    _refuse(call)
    impl, metadata = call.impl, call.metadata
    batch = flashinfer_batch(metadata) if hasattr(metadata, "prefill") else batch_of(metadata)
    rows = int(metadata.num_actual_tokens)
    window = window_from_left(int(impl.sliding_window[0]))
    _check_rows(call, batch, step)
    q = borrow(call.query[:rows].cpu(), "query")
    heads, dim = q.data.shape[1:]
    kv = {}
    for index, handle in enumerate(step.handles):
        new = int(batch.starts[index + 1] - batch.starts[index])
        first, end = live_rows(int(batch.lengths[index]), new, window)
        sides = read_rows(call.kv_cache, dim, batch.tables[index], first, end)
        keys, values = (Borrowed(np.ascontiguousarray(side.transpose(1, 0, 2)), q.dtype) for side in sides)
        kv[handle] = {KVFamily.DENSE: SeenKV(keys, values, first, step.generations[handle])}
    out = borrow(call.output[:rows].reshape(rows, heads, -1).cpu(), "output")
    return Observation(
        layer=call.number,
        requests=step.handles,
        request=step.request,
        positions=step.positions,
        q=Bits(q.data.copy(), q.dtype),
        kv=kv,
        sink=None if impl.sinks is None else _sink(impl.sinks),
        selection=Selection({KVFamily.DENSE: window_ranges(step.positions, window)}),
        out=Output(Bits(out.data.copy(), out.dtype), Origin.EXECUTED),
        lse=None,
        conventions=Conventions(
            scale_to_bits(impl.scale),
            window=window,
            probability_dtype=q.dtype,
            kv_source=KVSource.CONSUMED,
        ),
        provenance=Provenance(
            call.engine,
            call.signature.backend,
            _identity(call),
            details={"layer": call.name, "evidence": EVIDENCE},
        ),
        launch=_plan(call, rows, batch),
    )


def _refuse(call: GpuCall) -> None:
    impl, metadata = call.impl, call.metadata
    kind = getattr(getattr(impl, "attn_type", "decoder"), "value", getattr(impl, "attn_type", "decoder"))
    window = tuple(impl.sliding_window)
    checks = (
        (impl.alibi_slopes is not None, "uses ALiBi, a bias on the scores"),
        (bool(impl.logits_soft_cap), f"caps its scores softly at {impl.logits_soft_cap}"),
        (kind != "decoder", f"is {kind} attention"),
        (metadata.causal is not True, "is not causal"),
        (window[1] != (-1 if window[0] < 0 else 0), f"has a window of {window}"),
        (getattr(metadata, "rswa_window", None) is not None, "has a window that spares the prompt"),
        (_ranges(metadata) is not None, "reads ranges of an image in both directions"),
        (getattr(impl, "dcp_world_size", 1) > 1, "deals the context out to several ranks"),
        (call.kv_cache.dtype != call.query.dtype, f"has a KV cache of {impl.kv_cache_dtype}"),
    )
    found = next((what for wrong, what in checks if wrong), None)
    if found is not None:
        raise Unsupported(
            f"layer {call.name} {found}, which is not recorded of {call.signature.backend}; record a model "
            "or a setting without it.",
            rule="V-ARGUMENT",
            layer=call.name,
        )


def _ranges(metadata: Any) -> Any:
    names = ("mm_prefix_query_range_tensor", "mm_prefix_range_tensor", "mm_prefix_range")
    return next((found for name in names if (found := getattr(metadata, name, None)) is not None), None)


def _check_rows(call: GpuCall, batch: Batch, step: Step) -> None:
    """The kernel's own lengths must say what the runner's buffers say."""
    counts = np.diff(batch.starts)
    places = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    at = np.arange(places.size) - np.repeat(batch.starts[1:], counts) + batch.lengths[places]
    if not (np.array_equal(places, step.request) and np.array_equal(at, step.positions)):
        raise Unsupported(
            f"layer {call.name} was launched for rows {batch.starts.tolist()[:6]} and lengths "
            f"{batch.lengths.tolist()[:6]}, not for the {step.positions.size} rows of the model's input.",
            rule="V-ROWS",
            layer=call.name,
        )


def _plan(call: GpuCall, rows: int, batch: Batch) -> LaunchPlan:
    page = int(call.kv_cache.shape[2])
    return LaunchPlan(
        call.signature.kernel,
        np.arange(rows),
        rows,
        page_size=page,
        block_tables=tuple(
            np.asarray(table[: -(-int(n) // page)], np.int32)
            for table, n in zip(batch.tables, batch.lengths, strict=True)
        ),
        cu_seqlens=batch.starts,
        scalars={
            "scale": float(call.impl.scale),
            "blocks": int(call.kv_cache.shape[0]),
            "strides": str(tuple(call.kv_cache.stride())),
        },
        arrays={"seq_lens": batch.lengths},
    )


def _identity(call: GpuCall) -> ExecutedIdentity:
    """What ran: the libraries of this process, and the processor that holds the query."""
    device = call.query.device
    libraries = {"vllm": call.engine.partition(" ")[2], "torch": str(torch.__version__)}
    if device.type != "cuda":
        return ExecutedIdentity(call.signature.kernel, libraries, device=device.type)
    major, minor = torch.cuda.get_device_capability(device)
    return ExecutedIdentity(call.signature.kernel, libraries, device="cuda", arch=f"sm_{major}{minor}")


def _sink(sinks: torch.Tensor) -> Bits:
    data = borrow(sinks.detach().cpu(), "sinks")
    return Bits.from_float32(Bits(data.data.copy(), data.dtype).to_float32(), DType.FLOAT32)


def _host(tensor: torch.Tensor) -> Array:
    return tensor.detach().cpu().numpy().astype(np.int32)
