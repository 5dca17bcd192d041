"""The arguments of `DotProductAttention`, rebuilt from a call.

With a launch plan the very launch is rebuilt, padding and memory layout included; what stood in padding slots
is zero, because no row reads it. Without one the call becomes a fresh batch: one request a batch place, its
rows and keys from slot 0 on, padding behind. Its visibility is always given as a mask.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tracekit.model import Array, AttentionCall, Bits, DType, KVFamily, LaunchPlan, Ranges, scale_to_bits
from tracekit.model.launch_plan import Scalar
from tracekit.providers.torch_tensors import to_torch, torch_dtype

_SCALARS = (
    *("batch", "length", "softmax_scale", "softmax_coefficient", "softmax_in_fp32", "input_dtype"),
    *("sink_dtype", "grad", "mask_batch"),
)
_STRIDES = ("query_strides", "key_strides", "value_strides")
_ELEMENTS, _FACTOR = 1 << 28, 64
"""A launch may hold so many elements, or so many times those of its call where that is more."""


@dataclass(frozen=True, eq=False)
class Arguments:
    """What `DotProductAttention` is made and called with.

    Args:
        query: `[sq, b, np, hn]`.
        key: `[sk, b, ng, hn]`.
        value: likewise.
        mask: bool `[b or 1, 1, sq, sk]`, True where a key is hidden.
        sink: `[np]` or None.
        scalars: how the module is made.
        row_slots: the slot `b * sq + s` of each row of the call.
        kv_slots: per request the slots `b * sk + s` of its KV rows.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor
    sink: torch.Tensor | None
    scalars: Mapping[str, Scalar]
    row_slots: npt.NDArray[np.int64]
    kv_slots: tuple[npt.NDArray[np.int64], ...]


def relaunch(call: AttentionCall, plan: LaunchPlan) -> Arguments:
    """Rebuild the launch that a plan describes; `unusable` must have found nothing."""
    batch, length = whole(plan, "batch"), whole(plan, "length")
    q = np.zeros((batch * length, *call.q.shape[1:]), call.q.data.dtype)
    q[plan.row_slots] = call.q.data
    held = [call.kv[key][KVFamily.DENSE] for key in call.rows.requests]
    slots = [plan.row_slots[_in_order(call, index)] for index in range(len(held))]
    keys, values = (
        _placed([(where, part) for where, part in zip(slots, parts, strict=True)], batch * length)
        for parts in ([rows.keys.data for rows in held], [rows.value_bits.data for rows in held])
    )
    count = whole(plan, "mask_batch")
    if count:
        bits = np.unpackbits(plan.arrays["mask"], count=count * length * length)
        hidden = bits.astype(np.bool_).reshape(count, 1, length, length)
    else:
        # A module of type causal makes this mask itself, on a GPU; on the CPU it has to be given one.
        hidden = ~np.tri(length, dtype=np.bool_)[None, None]
    tensors = {
        name: _strided(_shaped(data, batch), call.dtype, plan.arrays[f"{name}_strides"])
        for name, data in (("query", q), ("key", keys), ("value", values))
    }
    if plan.scalars["grad"]:
        tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    return Arguments(
        **tensors,
        mask=torch.from_numpy(hidden),
        sink=_sink(call, plan.scalars),
        scalars=plan.scalars,
        row_slots=plan.row_slots,
        kv_slots=tuple(slots),
    )


def fresh(call: AttentionCall) -> Arguments:
    """Make a batch of a call of one dense family that has no plan."""
    requests = len(call.rows.requests)
    counts = np.bincount(call.rows.request, minlength=requests)
    length = int(counts.max())
    held = [call.kv[key][KVFamily.DENSE] for key in call.rows.requests]
    room = max(1, *(rows.count for rows in held))
    place = np.zeros(call.num_rows, np.int64)
    for index in range(requests):
        place[call.rows.request == index] = np.arange(counts[index])
    row_slots = call.rows.request * length + place
    hidden = np.ones((requests * length, room), np.bool_)
    part = call.selection.families[KVFamily.DENSE]
    for t in range(call.num_rows):
        hidden[row_slots[t], part.row(t) - held[call.rows.request[t]].first] = False
    q = np.zeros((requests * length, *call.q.shape[1:]), call.q.data.dtype)
    q[row_slots] = call.q.data
    starts = [index * room + np.arange(rows.count) for index, rows in enumerate(held)]
    keys, values = (
        _placed(list(zip(starts, parts, strict=True)), requests * room)
        for parts in ([rows.keys.data for rows in held], [rows.value_bits.data for rows in held])
    )
    query, key, value = (to_torch(Bits(_shaped(data, requests), call.dtype)) for data in (q, keys, values))
    scalars = _ordinary(call)
    mask = torch.from_numpy(hidden.reshape(requests, 1, length, room))
    return Arguments(query, key, value, mask, _sink(call, scalars), scalars, row_slots, tuple(starts))


def unusable(call: AttentionCall, plan: LaunchPlan) -> str | None:
    """Return why a plan does not describe the launch of its call, in one clause, or None.

    A trace may come from anywhere: nothing is made of a plan before every field of it was looked at.
    """
    missing = [name for name in _SCALARS if name not in plan.scalars]
    missing += [name for name in _STRIDES if name not in plan.arrays]
    if missing:
        return f"its launch plan lacks {', '.join(missing)}"
    wrong = [name for name in _SCALARS if not _fits(plan.scalars[name], name)]
    if wrong:
        return f"its launch plan has an unknown {', '.join(wrong)}"
    batch, length, masks = (whole(plan, name) for name in ("batch", "length", "mask_batch"))
    sizes = {
        name: (length, batch, *shape)
        for name, shape in (
            ("query_strides", call.q.shape[1:]),
            ("key_strides", (call.num_kv_heads, call.head_dim)),
            ("value_strides", (call.num_kv_heads, call.value_dim)),
        )
    }
    limit = max(_ELEMENTS, _FACTOR * call.q.size)
    if any(not _apart(plan.arrays[name], size, limit) for name, size in sizes.items()):
        return "its launch plan has tensors of another size"
    if batch * call.num_heads * length * length > limit or masks not in (0, 1, batch):
        return "its launch plan is of another size than the call"
    if plan.slots != batch * length or plan.row_slots.size != call.num_rows:
        return "its launch plan places rows outside its batch"
    if masks:
        packed = plan.arrays.get("mask")
        shape = (-(-masks * length * length // 8),)
        if packed is None or packed.dtype != np.uint8 or packed.shape != shape:
            return "its launch plan has a mask of another size"
    return _unplaced(call, plan, length)


def whole(plan: LaunchPlan, name: str) -> int:
    """Return a whole number of a launch plan."""
    value = plan.scalars[name]
    assert isinstance(value, int)
    return value


def _unplaced(call: AttentionCall, plan: LaunchPlan, length: int) -> str | None:
    """Keys stand in the slots of their queries, so each KV row needs a query row, all in one batch place."""
    for index, key in enumerate(call.rows.requests):
        held = call.kv[key][KVFamily.DENSE]
        order = _in_order(call, index)
        if held.first or not np.array_equal(call.rows.positions[order], np.arange(held.count)):
            return "its launch plan has KV rows without a slot"
        if np.unique(plan.row_slots[order] // length).size > 1:
            return "its launch plan puts one request into two places"
    return None


def _in_order(call: AttentionCall, index: int) -> npt.NDArray[np.int64]:
    """The rows of one request of a call, by position."""
    mine = np.flatnonzero(call.rows.request == index)
    order: npt.NDArray[np.int64] = mine[np.argsort(call.rows.positions[mine])]
    return order


def _placed(parts: list[tuple[npt.NDArray[np.int64], Array]], slots: int) -> Array:
    like = parts[0][1]
    placed = np.zeros((slots, *like.shape[1:]), like.dtype)
    for where, rows in parts:
        placed[where] = rows
    return placed


def _shaped(slots: Array, batch: int) -> Array:
    """Return `[s, b, h, d]` of slots `[b * s, h, d]`."""
    return slots.reshape(batch, -1, *slots.shape[1:]).swapaxes(0, 1)


def _strided(data: Array, dtype: DType, strides: Array) -> torch.Tensor:
    """The tensor with these bits and these steps in memory: a part of wider rows, as engines split them."""
    tensor = to_torch(Bits(data, dtype))
    steps = [int(step) for step in strides]
    return torch.empty_strided(tuple(tensor.shape), steps, dtype=tensor.dtype).copy_(tensor)


def _apart(strides: Any, shape: tuple[int, ...], limit: int) -> bool:
    """Whether strides give each element a place of its own, within a limit."""
    if not isinstance(strides, np.ndarray) or strides.dtype != np.int64 or strides.shape != (len(shape),):
        return False
    steps = sorted((int(step), size) for step, size in zip(strides, shape, strict=True) if size > 1)
    reach = 1
    for step, size in steps:
        if step < reach:
            return False
        reach = step * (size - 1) + reach
    return bool((strides >= 0).all()) and reach <= limit and math.prod(shape) <= limit


def _fits(value: Scalar, name: str) -> bool:
    """Whether a scalar has its type and lies in its range."""
    if name in ("batch", "length", "mask_batch"):
        return type(value) is int and (0 if name == "mask_batch" else 1) <= value < 1 << 31
    if name in ("softmax_in_fp32", "grad"):
        return isinstance(value, bool)
    if name in ("input_dtype", "sink_dtype"):
        return value is None or (isinstance(value, str) and value in tuple(DType))
    if name == "softmax_coefficient":
        return value is None or (type(value) is float and 0 < value < 2.0**31)
    return type(value) is float and 0 < value < 2.0**127


def scale_fits(call: AttentionCall, plan: LaunchPlan) -> bool:
    """Whether the factors of a launch are the one that its call declares."""
    scale, coefficient = plan.scalars["softmax_scale"], plan.scalars["softmax_coefficient"]
    assert isinstance(scale, float)
    whole_factor = scale * (coefficient if isinstance(coefficient, float) else 1.0)
    return scale_to_bits(whole_factor) == call.conventions.scale_bits


def _ordinary(call: AttentionCall) -> dict[str, Scalar]:
    """What a model of this dtype passes, with the softmax in FP32 as Megatron's training scripts set it."""
    half = call.dtype in (DType.BFLOAT16, DType.FLOAT16)
    return {
        "softmax_scale": call.conventions.scale,
        "softmax_coefficient": None,
        "softmax_in_fp32": True,
        "input_dtype": call.dtype.value if half else None,
        "sink_dtype": call.provenance.details.get("sink_dtype", call.dtype.value),
        "grad": False,
    }


def _sink(call: AttentionCall, scalars: Mapping[str, Scalar]) -> torch.Tensor | None:
    if call.sink is None:
        return None
    return to_torch(call.sink).to(torch_dtype(DType(str(scalars["sink_dtype"] or call.dtype.value))))


def reads_nothing(call: AttentionCall) -> bool:
    """Whether a row has no key: Megatron gives hidden keys the score -10000, so such a row reads them all."""
    part = call.selection.families[KVFamily.DENSE]
    empty = part.hi <= part.lo if isinstance(part, Ranges) else np.diff(part.offsets) == 0
    return bool(empty.any())
