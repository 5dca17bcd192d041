"""One launch of vLLM's CPU attention, in the logical words of the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from tracekit.canonical.window import live_rows, window_ranges
from tracekit.engines.torch_bits import copied, widened
from tracekit.engines.vllm_pages import PagedCache, StoredRows, cache_of, kv_dtype_of
from tracekit.engines.vllm_points import Scheduling
from tracekit.engines.vllm_rules import check_rows, refuse_arguments
from tracekit.engines.vllm_step import Step
from tracekit.env import settings
from tracekit.model import (
    Array,
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
from tracekit.model.launch_plan import Scalar
from tracekit.providers.vllm_cpu_cache import FLOAT8
from tracekit.providers.vllm_cpu_ops import executed
from tracekit.recorder.observation import Borrowed, Observation, SeenKV


@dataclass(frozen=True, eq=False)
class KernelCall:
    """The arguments and the answer of one `CPUAttentionBackendImpl.forward`.

    Args:
        name: of the layer, `model.layers.0.self_attn.attn`.
        number: the same as a number.
        layer: gives the scales of an FP8 cache.
        impl: the implementation; gives scale, window and sinks.
        query: `[N or more, H, D]`.
        kv_cache: `[blocks, Hkv, page_size, 2 * D]`.
        metadata: lengths, tables, and the plan of the kernel.
        output: `[N or more, H * D]` or `[N or more, H, D]`, filled.
        scheduling: what the plan was made with.
    """

    name: str
    number: int
    layer: Any
    impl: Any
    query: torch.Tensor
    kv_cache: torch.Tensor
    metadata: Any
    output: torch.Tensor
    scheduling: Scheduling


def observe_call(call: KernelCall, step: Step) -> Observation:
    """Return the logical side of a launch that has run; everything in it is a copy.

    Raises:
        Unsupported: the launch does something that a trace cannot say.
    """
    _refuse(call)
    metadata, impl = call.metadata, call.impl
    rows = int(metadata.num_actual_tokens)
    starts = metadata.query_start_loc.cpu().numpy().astype(np.int32)
    lengths = metadata.seq_lens.cpu().numpy().astype(np.int32)
    check_rows(call.name, starts, lengths, step)
    q = copied(call.query[:rows], "query")
    heads, dtype = q.shape[1], q.dtype
    cache = cache_of(call.layer, impl, call.kv_cache, call.scheduling.isa, call.query.dtype)
    window = impl.sliding_window if impl.sliding_window > 0 else None
    tables = metadata.block_table.cpu().numpy()
    seen = []
    for start, stop, length, table in zip(starts[:-1], starts[1:], lengths, tables, strict=True):
        first, end = live_rows(int(length), int(stop - start), window)
        seen.append(cache.rows(table, first, end))
    kv = {
        handle: {KVFamily.DENSE: _seen(cache, part, dtype, step.generations[handle])}
        for handle, part in zip(step.handles, seen, strict=True)
    }
    out = copied(call.output[:rows].reshape(rows, heads, -1), "output")
    plan = _plan(call, rows, starts, lengths, tables, seen)
    portable = is_portable(impl)
    return Observation(
        layer=call.number,
        requests=step.handles,
        request=step.request,
        positions=step.positions,
        q=q,
        kv=kv,
        sink=None if impl.sinks is None else widened(impl.sinks, "sinks"),
        selection=Selection({KVFamily.DENSE: window_ranges(step.positions, window)}),
        out=Output(out, Origin.EXECUTED),
        lse=Output(impl.lse, Origin.EXECUTED) if portable else None,
        conventions=Conventions(
            scale_to_bits(impl.scale),
            window=window,
            probability_dtype=DType.FLOAT32 if portable else dtype,
            kv_source=KVSource.CONSUMED,
        ),
        provenance=Provenance(
            engine_name(),
            "tracekit as CPU_ATTN" if portable else "CPU_ATTN",
            _identity(call),
            settings().threads if portable else torch.get_num_threads(),
            _details(call, plan.scalars),
        ),
        launch=plan,
    )


@cache
def engine_name() -> str:
    """The engine and its version."""
    import vllm

    return f"vllm {vllm.__version__}"


def _split_kv() -> bool:
    from vllm import envs

    return bool(envs.VLLM_CPU_ATTN_SPLIT_KV)


def is_portable(impl: Any) -> bool:
    """Whether an implementation is TKA-1 (`vllm_backend`), which says so itself."""
    return isinstance(getattr(impl, "identity", None), ExecutedIdentity)


def _identity(call: KernelCall) -> ExecutedIdentity:
    """What ran."""
    if is_portable(call.impl):
        return call.impl.identity  # type: ignore[no-any-return]
    return executed(call.scheduling.isa, _split_kv())


def _refuse(call: KernelCall) -> None:
    cache, metadata = call.kv_cache, call.metadata
    more = (
        (metadata.dynamic_causal is not None, "is causal for some requests only"),
        (cache.ndim != 4, f"has a cache of shape {list(cache.shape)}"),
        (_kv_dtype(call) not in ("auto", *FLOAT8), f"has a KV cache of {call.impl.kv_cache_dtype}"),
    )
    refuse_arguments(call.name, call.impl, metadata, more)


def _seen(cache: PagedCache, rows: StoredRows, dtype: DType, generation: int) -> SeenKV:
    keys, values = cache.values(rows, dtype)
    return SeenKV(Borrowed(keys, dtype), Borrowed(values, dtype), rows.first, generation)


def _plan(
    call: KernelCall, rows: int, starts: Array, lengths: Array, tables: Array, seen: list[StoredRows]
) -> LaunchPlan:
    page = int(call.kv_cache.shape[2])
    kv_dtype = _kv_dtype(call)
    scalars: dict[str, Scalar] = {
        "isa": call.scheduling.isa,
        "kv_dtype": kv_dtype,
        "scale": float(call.impl.scale),
        "sink_dtype": None if call.impl.sinks is None else str(call.impl.sinks.dtype).removeprefix("torch."),
        "window": int(call.impl.sliding_window),
        "plan_window": call.scheduling.window,
        "plan_heads": call.scheduling.heads,
        # The plan itself holds addresses of the process that made it; vLLM makes it again from the same
        # arguments, and its size says whether it dealt the work out in the same way.
        "plan_bytes": int(call.metadata.scheduler_metadata.numel()),
        "threads": torch.get_num_threads(),
        "split_kv": _split_kv(),
        "k_scale": _scale(call, "_k"),
        "v_scale": _scale(call, "_v"),
        "blocks": int(call.kv_cache.shape[0]),
        "table_width": int(tables.shape[1]),
        "query_stride": int(call.query.stride(0)),
        "block_stride": int(call.kv_cache.stride(0)),
        "max_query_len": int(call.metadata.max_query_len),
        "max_seq_len": int(call.metadata.max_seq_len),
    }
    arrays: dict[str, Array] = {"seq_lens": lengths}
    if kv_dtype in FLOAT8:
        arrays["k_storage"] = np.concatenate([part.keys.transpose(1, 0, 2) for part in seen])
        arrays["v_storage"] = np.concatenate([part.values.transpose(1, 0, 2) for part in seen])
    return LaunchPlan(
        _identity(call).kernel,
        np.arange(rows),
        rows,
        page_size=page,
        block_tables=tuple(
            table[: -(-int(n) // page)].astype(np.int32) for table, n in zip(tables, lengths, strict=True)
        ),
        cu_seqlens=starts,
        scalars=scalars,
        arrays=arrays,
    )


def _details(call: KernelCall, scalars: Mapping[str, Scalar]) -> dict[str, str]:
    """What a launch of other rows needs to be one of the same kind."""
    details = {name: str(scalars[name]) for name in ("isa", "kv_dtype", "sink_dtype") if scalars[name]}
    details |= {"layer": call.name, "page_size": str(call.kv_cache.shape[2])}
    if scalars["kv_dtype"] in FLOAT8:
        details |= {"k_scale": _scale(call, "_k").hex(), "v_scale": _scale(call, "_v").hex()}
    return details


def _kv_dtype(call: KernelCall) -> str:
    return kv_dtype_of(call.impl, call.kv_cache, call.query.dtype)


def _scale(call: KernelCall, side: str) -> float:
    return float(getattr(call.layer, f"{side}_scale_float"))
