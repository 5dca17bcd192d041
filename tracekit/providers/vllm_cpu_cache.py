"""The paged cache of vLLM's CPU operator, filled from the KV rows of a call."""

from dataclasses import dataclass

import numpy as np
import torch

from tracekit.errors import Unsupported
from tracekit.model import Array, AttentionCall, Bits, DType, LaunchPlan
from tracekit.providers.guarded import Guarded
from tracekit.providers.pages import hot_rows
from tracekit.providers.placement import Layout
from tracekit.providers.torch_tensors import torch_dtype
from tracekit.providers.vllm_cpu_launch import KV_DTYPES, Geometry, held
from tracekit.providers.vllm_cpu_packing import packing

FLOAT8 = {"fp8_e4m3": DType.FLOAT8_E4M3FN, "fp8_e5m2": DType.FLOAT8_E5M2}


@dataclass(frozen=True)
class CacheKind:
    """How the cache stores a value.

    Args:
        name: vLLM's cache dtype; `auto` stores the dtype of the model.
        k_scale: a stored key times this is the value.
        v_scale: likewise for values.
    """

    name: str = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0


def kind_of(call: AttentionCall, plan: LaunchPlan | None) -> CacheKind:
    """Return the kind of cache of the engine that made a call; `auto` where it had none of vLLM's."""
    details = call.provenance.details
    name = str(plan.scalars["kv_dtype"]) if plan is not None else details.get("kv_dtype", "auto")
    if name not in FLOAT8:
        return CacheKind()
    scales = []
    for scale in ("k_scale", "v_scale"):
        try:
            scales.append(float.fromhex(details[scale]))
        except (KeyError, ValueError, OverflowError):
            raise Unsupported(
                f"the call was read from an {name} cache and does not say {scale}.", rule="P-REFUSED"
            ) from None
    return CacheKind(name, *scales)


def decode(stored: Array, kind: DType, scale: float, dtype: DType) -> Bits | None:
    """Return FP8 rows as values of the model's dtype, or None where one is not exact in it.

    Args:
        stored: uint8.
        kind: the FP8 format.
        scale: of the cache.
        dtype: of the model.
    """
    exact = Bits(stored, kind).to_float64() * np.float64(np.float32(scale))
    rounded = Bits.from_float32(exact.astype(np.float32), dtype)
    same = (rounded.to_float64() == exact) | np.isnan(exact)
    return rounded if bool(same.all()) else None


def encode(values: Bits, kind: DType, scale: float) -> Array:
    """Return the FP8 bits of values that `decode` made.

    Raises:
        Unsupported: `P-FP8` when a value is none of that cache.
    """
    table = Bits(np.arange(256, dtype=np.uint8), kind).to_float64() * np.float64(np.float32(scale))
    codes = np.flatnonzero(~np.isnan(table))
    order = codes[np.lexsort((np.signbit(table[codes]) == 0, table[codes]))]
    wanted = values.to_float64()
    at = np.minimum(np.searchsorted(table[order], wanted), order.size - 1)
    # -0 and +0 are equal and stand side by side; the sign decides.
    at += (wanted == 0) & ~np.signbit(wanted)
    stored = order[at].astype(np.uint8)
    if not np.array_equal(table[stored], wanted):
        raise Unsupported(
            f"a value of the call is no {kind.value} times {scale}, so the cache cannot be made again.",
            rule="P-FP8",
        )
    return stored


def build_cache(
    call: AttentionCall,
    at: Geometry,
    isa: str,
    kind: CacheKind,
    plan: LaunchPlan | None,
    *,
    hot: bool = False,
    memory: Guarded | None = None,
) -> torch.Tensor:
    """Return the cache `[pages, Hkv, 2 * page_size, D]`, packed as the code path reads it.

    Args:
        call: gives the rows.
        at: gives each row its page.
        isa: the code path.
        kind: how values are stored.
        plan: holds the FP8 bytes as they were, where it is given.
        hot: fill what no row stands in with numbers of their size; else with zeros.
        memory: where the cache lies; its fill stands there instead.
    """
    heads, dim, dtype = call.num_kv_heads, call.head_dim, torch_dtype(call.dtype)
    fp8 = FLOAT8.get(kind.name)
    container = np.dtype(np.uint8) if fp8 else call.q.data.dtype
    keys = np.zeros((at.pages * at.page_size, heads, dim), container)
    values = np.zeros_like(keys)
    free = np.ones(len(keys), np.bool_)
    rows, first = held(call), 0
    for owner in range(len(rows)):
        table = at.tables[at.owners.index(owner)].astype(np.int64)
        ids = np.arange(rows[owner].first, min(rows[owner].end, table.size * at.page_size))
        slots = table[ids // at.page_size] * at.page_size + ids % at.page_size
        k, v = rows[owner].keys.part(slice(ids.size)), rows[owner].value_bits.part(slice(ids.size))
        if fp8 is None:
            keys[slots], values[slots] = k.data, v.data
        elif plan is not None:
            part = slice(first, first + ids.size)
            keys[slots], values[slots] = plan.arrays["k_storage"][part], plan.arrays["v_storage"][part]
        else:
            keys[slots], values[slots] = encode(k, fp8, kind.k_scale), encode(v, fp8, kind.v_scale)
        first += rows[owner].count
        free[slots] = False
    if memory is not None:
        keys[free] = values[free] = memory.fill.pattern(fp8 or call.dtype)
    elif hot:
        for side in (keys, values):
            numbers = hot_rows(Bits(side[~free], fp8 or call.dtype))
            side[free] = numbers[np.arange(int(free.sum())) % len(numbers)]
    order = packing(isa, dtype, kind.name, at.page_size, dim)
    shape = (at.pages, at.page_size, heads, dim)
    packed = order.pack(
        *(np.ascontiguousarray(x.reshape(shape).transpose(0, 2, 1, 3)) for x in (keys, values))
    )
    if memory is not None:
        packed = memory.held(packed, fp8 or call.dtype, "the KV cache")
    words = packed.view(np.dtype(f"i{packed.itemsize}") if fp8 is None else np.uint8)
    tensor = torch.from_numpy(words.reshape(at.pages, heads, 2 * at.page_size, dim))
    return tensor if fp8 else tensor.view(dtype)


def lay_out(cache: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, ...]:
    """Return keys and values `[pages, Hkv, page_size, D]` of a cache that `build_cache` made, in a layout.

    Inside the page of a head the order stays: the operator asks for the strides of pages and heads only.
    """
    if layout is Layout.HEADS_FIRST:
        cache = cache.transpose(0, 1).contiguous().transpose(0, 1)
    sides = cache.chunk(2, dim=2)
    return tuple(side.contiguous() for side in sides) if layout is Layout.APART_HND else sides


assert set(FLOAT8) | {"auto"} == set(KV_DTYPES)
