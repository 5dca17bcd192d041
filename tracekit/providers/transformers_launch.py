"""The arguments of a transformers attention function, rebuilt from a call.

With a launch plan the very launch is rebuilt, padding and memory layout included; what stood in padding
slots is zero, because no row reads it. Without one (rows permuted, a request alone) the call becomes a
fresh batch: one sequence a request, padded on the left. Its visibility is always given as a mask, also where
the engine would pass none: a claim must vary only what it names, and without a mask sdpa goes another way.
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
from tracekit.providers.transformers_plan import key_slots, rows_held, whole


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


def relaunch(call: AttentionCall, plan: LaunchPlan) -> Arguments:
    """Rebuild the launch that a plan describes; `unusable` must have found nothing."""
    batch, length, held = (whole(plan, name) for name in ("batch", "query_length", "key_length"))
    places, slots = key_slots(call, plan)
    shape = _Shape(batch, length, held, places, slots, plan.row_slots)
    return _arguments(call, shape, rebuild_mask(plan), plan.scalars)


def fresh(call: AttentionCall, implementation: str) -> Arguments:
    """Make a batch of a call that has no plan.

    Args:
        call: one KV family.
        implementation: `sdpa` or `eager`; decides the kind of mask.
    """
    rows = rows_held(call)
    counts = np.bincount(call.rows.request, minlength=len(rows))
    batch, length, held = len(rows), int(counts.max()), max(max(r.count for r in rows), 1)
    row_slots = np.zeros(call.num_rows, np.int64)
    visible = np.zeros((batch, length, held), np.bool_)
    part = next(iter(call.selection.families.values()))
    taken = length - counts
    for t in range(call.num_rows):
        b = int(call.rows.request[t])
        row_slots[t] = b * length + taken[b]
        visible[b, taken[b], part.row(t) - rows[b].first + held - rows[b].count] = True
        taken[b] += 1
    slots = [np.arange(held - r.count, held) for r in rows]
    shape = _Shape(batch, length, held, list(range(batch)), slots, row_slots)
    scalars = _scalars(call, implementation)
    return _arguments(call, shape, mask_of_kind(visible, scalars), scalars)


@dataclass(frozen=True, eq=False)
class _Shape:
    batch: int
    length: int
    held: int
    places: list[int]
    key_slots: list[npt.NDArray[np.int64]]
    row_slots: npt.NDArray[np.int64]


def _arguments(
    call: AttentionCall, shape: _Shape, mask: torch.Tensor | None, scalars: Mapping[str, Scalar]
) -> Arguments:
    q = np.zeros((shape.batch * shape.length, *call.q.shape[1:]), call.q.data.dtype)
    q[shape.row_slots] = call.q.data
    rows = rows_held(call)
    keys = _cache(shape, [held.keys.data for held in rows])
    values = _cache(shape, [held.value_bits.data for held in rows])
    q = q.reshape(shape.batch, shape.length, *q.shape[1:])
    if scalars["q_layout"] == "bshd":
        query = to_torch(Bits(q, call.dtype)).transpose(1, 2)
    else:
        query = to_torch(Bits(q.transpose(0, 2, 1, 3), call.dtype))
    key = _laid_out(to_torch(Bits(keys, call.dtype)), scalars["kv_layout"])
    value = _laid_out(to_torch(Bits(values, call.dtype)), scalars.get("v_layout", scalars["kv_layout"]))
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


def _laid_out(tensor: torch.Tensor, layout: Scalar) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if layout == "bshd" else tensor


def _cache(shape: _Shape, rows: list[Array]) -> Array:
    cache = np.zeros((shape.batch, rows[0].shape[1], shape.held, rows[0].shape[2]), rows[0].dtype)
    for place, slots, part in zip(shape.places, shape.key_slots, rows, strict=True):
        cache[place][:, slots] = part.transpose(1, 0, 2)
    return cache


def _scalars(call: AttentionCall, implementation: str) -> dict[str, Scalar]:
    """What the engine passes for an ordinary decoder layer."""
    kind = torch_dtype(call.dtype)
    return {
        "scaling": call.conventions.scale,
        "is_causal": None,
        "module_is_causal": True,
        "grad": False,
        "q_layout": "bshd",
        "kv_layout": "bhsd",
        "sink_dtype": call.dtype.value,
        "mask_kind": "additive" if implementation == "eager" else "bool",
        "mask_low": float(torch.finfo(kind).min),
        "mask_dtype": call.dtype.value,
    }
