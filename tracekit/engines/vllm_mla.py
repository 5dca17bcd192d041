"""Multi-head latent attention in vLLM on the CPU: cached latents, as its absorbed kernels read them.

A layer launches up to twice in a step: `forward_mqa` for rows of decodes, which stand first in a batch, and
`forward_mha` for rows of prefills. On processors with AMX (`AMX_MLA`) both attend over the cached latents
`[kv_lora | rope]`, of which the first part is the value. Without (`CPU_MLA`) a prefill expands keys and
values per head, which are other rows than the cached ones: those launches are refused by name.
"""

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tracekit.canonical.mla import latent_rows
from tracekit.canonical.paged import page_slots
from tracekit.canonical.window import window_ranges
from tracekit.engines.patch import Arguments, Entry
from tracekit.engines.torch_bits import borrow, copied
from tracekit.engines.vllm_call import engine_name
from tracekit.engines.vllm_dsv4 import Looks, Seen
from tracekit.engines.vllm_points import layer_number
from tracekit.engines.vllm_step import Step
from tracekit.errors import Unsupported
from tracekit.model import (
    Array,
    Conventions,
    ExecutedIdentity,
    KVFamily,
    KVSource,
    Origin,
    Output,
    Provenance,
    Selection,
    scale_to_bits,
)
from tracekit.providers.engines import vllm_version
from tracekit.providers.vllm_cpu_ops import library_name
from tracekit.recorder.observation import Borrowed, Observation, SeenKV

_NULL_PAGE = 0
EXTEND = "extend_attention_cpu"
"""The operator of a prefill with AMX; its first arguments are q, new keys, new values, and O."""
_ARGUMENTS = ("q", "kv_c_and_k_pe_cache", "attn_metadata")
"""What is read of the arguments of both launches."""
_DECODE = {"CPUMLAImpl": "mla_decode_kvcache", "AMXMLAImpl": "decode_attention_cpu"}


@dataclass(frozen=True, eq=False)
class LatentLaunch:
    """One launch over latents.

    Args:
        operator: that ran.
        q: `[n, H, kv_lora + rope]`.
        out: `[n, H, kv_lora]`, filled.
        cache: `[pages, page_size, kv_lora + rope]`.
        tables: int `[R, nb]`, of the requests of these rows.
        rows: int64 `[n]`, the places of its rows in the step.
    """

    operator: str
    q: torch.Tensor
    out: torch.Tensor
    cache: torch.Tensor
    tables: torch.Tensor
    rows: Array


def mla_entries(layers: Mapping[str, Any], recorder: Looks) -> list[Entry]:
    """Return what is wrapped of the layers of a model.

    Args:
        layers: vLLM's `MLAAttention` by name.
        recorder: gets what is seen.
    """
    if not layers:
        return []
    seen = Seen(recorder)
    entries = []
    if hasattr(torch.ops._C, EXTEND):
        entries.append(Entry(EXTEND, vars(torch.ops._C), EXTEND, seen.before(EXTEND)))
    for name, layer in layers.items():
        impl = layer.impl
        entries.append(Entry(name, vars(impl), "forward_mqa", _decodes(name, impl, recorder)))
        entries.append(Entry(name, vars(impl), "forward_mha", _prefills(name, impl, recorder, seen)))
    return entries


def _decodes(name: str, impl: Any, recorder: Looks) -> Callable[[Any], Any]:
    original = impl.forward_mqa
    given = Arguments(original)

    def forward_mqa(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)

        def observe(step: Step) -> Observation:
            q, cache, metadata = given.of(args, kwargs, *_ARGUMENTS)
            whole = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
            rows = np.arange(int(metadata.num_decode_tokens))
            tables, operator = metadata.decode.block_table, _DECODE[type(impl).__name__]
            return observe_latents(
                name, impl, LatentLaunch(operator, whole, answer[0], cache, tables, rows), step
            )

        recorder.look(name, observe, launches=lambda: _launches(*given.of(args, kwargs, "attn_metadata")))
        return answer

    return lambda _: forward_mqa


def _prefills(name: str, impl: Any, recorder: Looks, seen: Seen) -> Callable[[Any], Any]:
    original = impl.forward_mha
    given = Arguments(original)

    def forward_mha(*args: Any, **kwargs: Any) -> Any:
        seen.clear()
        answer = original(*args, **kwargs)
        ran = seen.ran.get(EXTEND, [])
        seen.clear()

        def observe(step: Step) -> Observation:
            if len(ran) != 1:
                raise Unsupported(
                    f"layer {name} expands the keys and values of a prefill per head "
                    f"({type(impl).__name__}); they are not the latents that its cache holds, and are not "
                    "recorded. Its decodes are.",
                    rule="V-MLA-PREFILL",
                    layer=name,
                )
            _, cache, metadata = given.of(args, kwargs, *_ARGUMENTS)
            query, out = ran[0][0][0], ran[0][0][3]
            rows = int(metadata.num_decode_tokens) + np.arange(query.shape[0])
            return observe_latents(
                name, impl, LatentLaunch(EXTEND, query, out, cache, metadata.prefill.block_table, rows), step
            )

        recorder.look(name, observe, launches=lambda: _launches(*given.of(args, kwargs, "attn_metadata")))
        return answer

    return lambda _: forward_mha


def _launches(metadata: Any) -> int:
    """Launches of each layer in a step."""
    return int(metadata.num_decodes > 0) + int(metadata.num_prefills > 0)


def observe_latents(name: str, impl: Any, launch: LatentLaunch, step: Step) -> Observation:
    """Return the logical side of a launch that has run; everything in it is a copy.

    Raises:
        Unsupported: `V-ROWS` when its rows are not those of the step.
        InvalidCall: `C-PAGE-...` when a table gives a row no page of its own.
    """
    rows = launch.rows
    if launch.q.shape[0] != rows.size or rows.size == 0 or rows[-1] >= step.positions.size:
        raise Unsupported(
            f"layer {name} was launched for {launch.q.shape[0]} rows, which are not rows of the model's "
            "input.",
            rule="V-ROWS",
            layer=name,
        )
    places, request = np.unique(step.request[rows], return_inverse=True)
    positions = step.positions[rows]
    tables = launch.tables.cpu().numpy()
    kv = {}
    for place, table in zip(places.tolist(), tables, strict=False):
        count = int(positions[step.request[rows] == place].max()) + 1
        kv[step.handles[place]] = {KVFamily.DENSE: _latents(launch, table, count, int(impl.kv_lora_rank))}
    q = copied(launch.q, "query")
    return Observation(
        layer=layer_number(name),
        requests=tuple(step.handles[place] for place in places),
        request=request.astype(np.int32),
        positions=positions,
        q=q,
        kv=kv,
        sink=None,
        selection=Selection({KVFamily.DENSE: window_ranges(positions, None)}),
        out=Output(copied(launch.out, "output"), Origin.EXECUTED),
        lse=None,
        conventions=Conventions(
            scale_to_bits(impl.scale),
            output_boundary="latent, before the value projection",
            probability_dtype=q.dtype,
            kv_source=KVSource.CONSUMED,
        ),
        provenance=Provenance(
            engine_name(),
            type(impl).__name__,
            _executed(launch.operator),
            torch.get_num_threads(),
            {"layer": name, "page_size": str(launch.cache.shape[1])},
        ),
    )


def _latents(launch: LatentLaunch, table: Array, count: int, width: int) -> SeenKV:
    """The latents 0 .. count - 1 of a request, read back from their pages."""
    pages, page = launch.cache.shape[:2]
    slots = page_slots(table, np.arange(count), page, pages=pages, null_page=_NULL_PAGE)
    cache = borrow(launch.cache, "cache")
    keys, values = latent_rows(cache.data[slots // page, slots % page], width)
    heads_first = (np.ascontiguousarray(side.transpose(1, 0, 2)) for side in (keys, values))
    k, v = (Borrowed(side, cache.dtype) for side in heads_first)
    return SeenKV(k, v)


def _executed(operator: str) -> ExecutedIdentity:
    package, number = vllm_version()
    libraries = {package: number, "torch": str(torch.__version__)}
    isa = f"{library_name()}:{'amx' if operator in (EXTEND, _DECODE['AMXMLAImpl']) else 'vec'}"
    return ExecutedIdentity(f"vllm.{operator}", libraries, arch=platform.machine(), isa=isa)
