"""The arguments of a transformers attention function, rebuilt from a call.

With a launch plan the very launch is rebuilt, padding and memory layout included; what stood in padding
slots is zero, because no row reads it. Without one (rows permuted, a request alone) the call becomes a
fresh batch: one sequence a request, padded on the left. Compressed rows stand behind those of the window, in
the same tensor. Its visibility is always given as a mask, also where the engine would pass none: a claim must
vary only what it names, and without a mask sdpa goes another way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tracekit.model import Array, AttentionCall, Bits, DType, LaunchPlan
from tracekit.model.launch_plan import Scalar
from tracekit.providers.torch_tensors import to_torch, torch_dtype
from tracekit.providers.transformers_mask import mask_of_kind, rebuild_mask
from tracekit.providers.transformers_plan import Segment, rows_held, segments, whole


@dataclass(frozen=True, eq=False)
class Arguments:
    """What the attention function gets.

    Args:
        module: a stand-in with the attributes that the function reads.
        q: `[B, H, S, D]`.
        k: `[B, Hkv, T, D]`.
        v: `[B, Hkv, T, Dv]`.
        mask: `[B, 1, S, T]` or None.
        kwargs: the rest.
        row_slots: the slot `b * S + s` of each row of the call.
    """

    module: Any
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    kwargs: dict[str, Any]
    row_slots: npt.NDArray[np.int64]


_HEADS_FIRST = ("deepseek_v4", "deepseek_v32")
"""Models whose queries lie in memory head by head."""


def relaunch(call: AttentionCall, plan: LaunchPlan) -> Arguments:
    """Rebuild the launch that a plan describes; `unusable` must have found nothing."""
    batch, length = (whole(plan, name) for name in ("batch", "query_length"))
    places, parts = segments(call, plan)
    shape = _Shape(batch, length, places, parts, plan.row_slots)
    return _arguments(call, shape, rebuild_mask(plan), plan.scalars)


def fresh(call: AttentionCall, implementation: str) -> Arguments:
    """Make a batch of a call that has no plan.

    Args:
        call: one KV family, or two of which the second is compressed.
        implementation: `sdpa` or `eager`; decides the kind of mask.
    """
    counts = np.bincount(call.rows.request, minlength=len(call.rows.requests))
    batch, length = len(call.rows.requests), int(counts.max())
    row_slots = np.zeros(call.num_rows, np.int64)
    taken = length - counts
    for t in range(call.num_rows):
        b = int(call.rows.request[t])
        row_slots[t] = b * length + taken[b]
        taken[b] += 1
    parts, masks = [], []
    for family, part in call.selection.families.items():
        rows = rows_held(call, family)
        held = max(r.count for r in rows)
        # Padding stands before tokens and behind compressed rows, and at least one slot holds a token.
        held = max(held, 1) if family.ratio == 1 else held
        starts = [held - r.count if family.ratio == 1 else 0 for r in rows]
        visible = np.zeros((batch, length, held), np.bool_)
        for t in range(call.num_rows):
            b, s = divmod(int(row_slots[t]), length)
            visible[b, s, part.row(t) - rows[b].first + starts[b]] = True
        masks.append(visible)
        slots = [np.arange(start, start + r.count) for start, r in zip(starts, rows, strict=True)]
        parts.append(Segment(family, held, slots))
    visible = np.concatenate(masks, axis=2)
    shape = _Shape(batch, length, list(range(batch)), parts, row_slots)
    scalars = _scalars(call, implementation)
    if len(parts) > 1 and parts[1].family.ratio > 1:
        scalars |= {"compressed_length": parts[1].length, "mask_low_compressed": -np.inf}
    return _arguments(call, shape, mask_of_kind(visible, scalars), scalars)


@dataclass(frozen=True, eq=False)
class _Shape:
    batch: int
    length: int
    places: list[int]
    segments: list[Segment]
    row_slots: npt.NDArray[np.int64]


def _arguments(
    call: AttentionCall, shape: _Shape, mask: torch.Tensor | None, scalars: Mapping[str, Scalar]
) -> Arguments:
    q = np.zeros((shape.batch * shape.length, *call.q.shape[1:]), call.q.data.dtype)
    q[shape.row_slots] = call.q.data
    held = [rows_held(call, segment.family) for segment in shape.segments]
    shared = all(rows.shared for part in held for rows in part)
    keys = _cache(shape, [[rows.keys.data for rows in part] for part in held])
    values = keys if shared else _cache(shape, [[rows.value_bits.data for rows in part] for part in held])
    q = q.reshape(shape.batch, shape.length, *q.shape[1:])
    if scalars["q_layout"] == "bshd":
        query = to_torch(Bits(q, call.dtype)).transpose(1, 2)
    else:
        query = to_torch(Bits(q.transpose(0, 2, 1, 3), call.dtype))
    key = _laid_out(to_torch(Bits(keys, call.dtype)), scalars["kv_layout"])
    layout = scalars.get("v_layout", scalars["kv_layout"])
    value = key if shared else _laid_out(to_torch(Bits(values, call.dtype)), layout, scalars)
    if scalars["grad"]:
        query, key, value = (x.requires_grad_() for x in (query, key, value))
    module = torch.nn.Module()
    module.num_key_value_groups = call.num_heads // call.num_kv_heads  # type: ignore[assignment]
    module.is_causal = bool(scalars["module_is_causal"])  # type: ignore[assignment]
    module.eval()
    kwargs: dict[str, Any] = {"scaling": scalars["scaling"], "dropout": 0.0}
    if scalars["is_causal"] is not None:
        kwargs["is_causal"] = scalars["is_causal"]
    if call.sink is not None:
        kind = torch_dtype(DType(str(scalars["sink_dtype"])))
        module.sinks = kwargs["s_aux"] = to_torch(call.sink).to(kind)
    return Arguments(module, query, key, value, mask, kwargs, shape.row_slots)


def _laid_out(
    tensor: torch.Tensor, layout: Scalar, wider: Mapping[str, Scalar] | None = None
) -> torch.Tensor:
    """Return `[B, H, T, D]` with the axes in memory in another order, and as a part of wider rows."""
    if layout != "bshd":
        return tensor
    rows = tensor.transpose(1, 2).contiguous()
    row, skip = (wider or {}).get("v_row"), (wider or {}).get("v_skip")
    if isinstance(row, int) and isinstance(skip, int):
        part = rows.new_zeros((*rows.shape[:-1], row))[..., skip : skip + rows.shape[-1]]
        rows = part.copy_(rows)
    return rows.transpose(1, 2)


def _cache(shape: _Shape, held: list[list[Array]]) -> Array:
    """Return `[B, Hkv, T, D]`: the rows of each family and request in their slots."""
    like = held[0][0]
    total = sum(segment.length for segment in shape.segments)
    cache = np.zeros((shape.batch, like.shape[1], total, like.shape[2]), like.dtype)
    start = 0
    for segment, parts in zip(shape.segments, held, strict=True):
        for place, slots, part in zip(shape.places, segment.slots, parts, strict=True):
            cache[place][:, start + slots] = part.transpose(1, 0, 2)
        start += segment.length
    return cache


def _scalars(call: AttentionCall, implementation: str) -> dict[str, Scalar]:
    """What the engine passes for an ordinary decoder layer."""
    kind = torch_dtype(call.dtype)
    details = call.provenance.details
    heads_first = any(f".{name}." in details.get("module", "") for name in _HEADS_FIRST)
    return {
        "scaling": call.conventions.scale,
        "is_causal": None,
        "module_is_causal": True,
        "grad": False,
        "q_layout": "bhsd" if heads_first else "bshd",
        "kv_layout": "bhsd",
        "sink_dtype": details.get("sink_dtype", call.dtype.value),
        "mask_kind": "additive" if implementation == "eager" else "bool",
        "mask_low": float(torch.finfo(kind).min),
        "mask_dtype": call.dtype.value,
    }
