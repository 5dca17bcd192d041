"""A launch of one of vLLM's implementations for GPUs, in the logical words of the model.

How it is read is known by signature alone (`vllm_signatures`), so nothing is recorded of a layer before rows
of it, computed again, fit what is declared (`recorder/first_launch.py`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tracekit.canonical.window import live_rows, window_from_left, window_ranges
from tracekit.engines.patch import EVIDENCE
from tracekit.engines.torch_bits import copied, widened
from tracekit.engines.vllm_rules import check_rows, refuse_arguments
from tracekit.engines.vllm_signatures import (
    Batch,
    Signature,
    batch_of,
    flashinfer_batch,
    read_rows,
)
from tracekit.engines.vllm_step import Step
from tracekit.model import (
    Conventions,
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
    check_rows(call.name, batch.starts, batch.lengths, step)
    q = copied(call.query[:rows], "query")
    heads, dim = q.shape[1:]
    kv = {}
    for index, handle in enumerate(step.handles):
        new = int(batch.starts[index + 1] - batch.starts[index])
        first, end = live_rows(int(batch.lengths[index]), new, window)
        sides = read_rows(call.kv_cache, dim, batch.tables[index], first, end)
        keys, values = (Borrowed(np.ascontiguousarray(side.transpose(1, 0, 2)), q.dtype) for side in sides)
        kv[handle] = {KVFamily.DENSE: SeenKV(keys, values, first, step.generations[handle])}
    return Observation(
        layer=call.number,
        requests=step.handles,
        request=step.request,
        positions=step.positions,
        q=q,
        kv=kv,
        sink=None if impl.sinks is None else widened(impl.sinks, "sinks"),
        selection=Selection({KVFamily.DENSE: window_ranges(step.positions, window)}),
        out=Output(copied(call.output[:rows].reshape(rows, heads, -1), "output"), Origin.EXECUTED),
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
    window = tuple(impl.sliding_window)
    more = (
        (window[1] != (-1 if window[0] < 0 else 0), f"has a window of {window}"),
        (getattr(metadata, "rswa_window", None) is not None, "has a window that spares the prompt"),
        (_ranges(metadata) is not None, "reads ranges of an image in both directions"),
        (getattr(impl, "dcp_world_size", 1) > 1, "deals the context out to several ranks"),
        (call.kv_cache.dtype != call.query.dtype, f"has a KV cache of {impl.kv_cache_dtype}"),
    )
    refuse_arguments(call.name, impl, metadata, more)


def _ranges(metadata: Any) -> Any:
    names = ("mm_prefix_query_range_tensor", "mm_prefix_range_tensor", "mm_prefix_range")
    return next((found for name in names if (found := getattr(metadata, name, None)) is not None), None)


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
