"""Whether a launch plan describes the launch of its call. A trace may come from anywhere: check first."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.model import AttentionCall, DType, KVFamily, KVRows, LaunchPlan, scale_to_bits

_WHOLE = ("batch", "query_length", "key_length")
_LAYOUTS = ("bshd", "bhsd", "other")
_STRIDED = {"q_layout": "q", "kv_layout": "k", "v_layout": "v"}
"""`kv_layout` is that of k, and of v too in plans that have no `v_layout`."""

_WIDER = ("v_row", "v_skip")
"""Where v is a part of wider rows, of keys and values: their length, and what stands before v."""

_MASKS = ("none", "bool", "additive")
_DTYPES = (DType.BFLOAT16.value, DType.FLOAT16.value, DType.FLOAT32.value)
_NAMES = (
    *(*_WHOLE, "mask_kind", "scaling", "is_causal", "module_is_causal"),
    *("q_layout", "kv_layout", "grad", "sink_dtype"),
)
_ELEMENTS, _FACTOR = 1 << 28, 64
"""A launch may hold so many elements, or so many times those of its call where that is more."""


def unusable(call: AttentionCall, plan: LaunchPlan) -> str | None:
    """Return why a plan does not describe the launch of its call, in one clause, or None."""
    masked = plan.scalars.get("mask_kind") != "none"
    if len(call.selection.families) == 1 and "compressed_length" in plan.scalars:
        return "its launch plan is one of two KV families, the call has one"
    names = _names(call, plan, masked)
    missing = [name for name in names if name not in plan.scalars]
    missing += [name for name in ("key_real", *(["mask"] if masked else [])) if name not in plan.arrays]
    if missing:
        return f"its launch plan lacks {', '.join(missing)}"
    wrong = [name for name in names if not _fits(call, plan, name)]
    if wrong:
        told = ", ".join(f"{name} {plan.scalars[name]!r:.40}" for name in wrong)
        return f"its launch plan has no usable {told}"
    strided = [tensor for name, tensor in _STRIDED.items() if plan.scalars.get(name) == "other"]
    if strided:
        return f"the strides of {', '.join(strided)} are not recorded"
    return _unusable_sizes(call, plan, masked)


def _names(call: AttentionCall, plan: LaunchPlan, masked: bool) -> list[str]:
    """The scalars that a plan needs, and those of the others that it has."""
    two, additive = len(call.selection.families) > 1, plan.scalars.get("mask_kind") == "additive"
    low = two and additive and plan.scalars.get("compressed_length") != 0
    return [
        *_NAMES,
        *(["mask_batch"] if masked else []),
        *(["mask_low", "mask_dtype"] if additive else []),
        *(["compressed_length"] if two else []),
        *(["mask_low_compressed"] if low else []),
        *(["v_layout"] if "v_layout" in plan.scalars else []),
        *(_WIDER if any(name in plan.scalars for name in _WIDER) else []),
    ]


@dataclass(frozen=True, eq=False)
class Segment:
    """The key slots of one family: how many, and which of them hold the rows of each request."""

    family: KVFamily
    length: int
    slots: list[npt.NDArray[np.int64]]


def segments(call: AttentionCall, plan: LaunchPlan) -> tuple[list[int], list[Segment]]:
    """The batch place of each request, and the key slots of each family."""
    batch, length, held = (whole(plan, name) for name in _WHOLE)
    packed = np.asarray(plan.arrays["key_real"], np.uint8)
    real = np.unpackbits(packed, count=batch * held).astype(np.bool_).reshape(batch, held)
    first = [int(np.argmax(call.rows.request == i)) for i in range(len(call.rows.requests))]
    places = [int(plan.row_slots[row]) // length for row in first]
    compressed = whole(plan, "compressed_length") if "compressed_length" in plan.scalars else 0
    lengths = [held - compressed, compressed]
    parts, start = [], 0
    for family, size in zip(call.selection.families, lengths, strict=False):
        part = real[:, start : start + size]
        parts.append(Segment(family, size, [np.flatnonzero(part[place]) for place in places]))
        start += size
    return places, parts


def rows_held(call: AttentionCall, family: KVFamily) -> list[KVRows]:
    """The KV rows of each request, of one family."""
    return [call.kv[key][family] for key in call.rows.requests]


def whole(plan: LaunchPlan, name: str) -> int:
    """Return a whole number of a launch plan."""
    value = plan.scalars[name]
    assert isinstance(value, int)
    return value


def _fits(call: AttentionCall, plan: LaunchPlan, name: str) -> bool:
    """Whether a scalar has its type and lies in its range."""
    value = plan.scalars[name]
    if name in (*_WHOLE, "mask_batch"):
        return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 31
    if name == "compressed_length":
        held = plan.scalars["key_length"]
        return type(value) is int and type(held) is int and 0 <= value < held
    if name in _WIDER:
        row, skip = (plan.scalars[one] for one in _WIDER)
        dim = call.value_dim
        return type(row) is int and type(skip) is int and 0 <= skip <= row - dim and row < 1 << 31
    if name == "scaling":
        return _is_scale(call, value)
    if name in ("mask_low", "mask_low_compressed"):
        return isinstance(value, float) and value < 0
    if name in ("module_is_causal", "grad"):
        return isinstance(value, bool)
    if name == "is_causal":
        return value is None or isinstance(value, bool)
    if name == "sink_dtype" and call.sink is None:
        return True
    valid = {"mask_kind": _MASKS, "q_layout": _LAYOUTS, "kv_layout": _LAYOUTS, "v_layout": _LAYOUTS}.get(
        name, _DTYPES
    )
    return isinstance(value, str) and value in valid


def _is_scale(call: AttentionCall, value: object) -> bool:
    """Whether the factor of a launch is the one that its call declares; None is that of the head size."""
    if value is None:
        value = call.q.shape[2] ** -0.5
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if not 0 < value < 2.0**127 or not math.isfinite(value):
        return False
    return scale_to_bits(float(value)) == call.conventions.scale_bits


def _unusable_sizes(call: AttentionCall, plan: LaunchPlan, masked: bool) -> str | None:
    batch, length, held = (whole(plan, name) for name in _WHOLE)
    masks = whole(plan, "mask_batch") if masked else 0
    rows = [held_rows for family in call.selection.families for held_rows in rows_held(call, family)]
    q, keys, values = call.q.data, rows[0].keys.data, rows[0].value_bits.data
    key_row, value_row = math.prod(keys.shape[1:]), math.prod(values.shape[1:])
    own = q.size + sum(r.count for r in rows) * (key_row + value_row)
    if "v_row" in plan.scalars:
        value_row = values.shape[1] * whole(plan, "v_row")
    elements = batch * (length * math.prod(q.shape[1:]) + held * (key_row + value_row))
    if elements + masks * length * held > max(_ELEMENTS, _FACTOR * own):
        return "its launch plan is of another size than the call"
    if plan.row_slots.size != call.num_rows or plan.row_slots.max(initial=-1) >= batch * length:
        return "its launch plan places rows outside its batch"
    if masked and masks not in (1, batch):
        return "its launch plan has a mask of another batch"
    bits = {"key_real": batch * held, **({"mask": masks * length * held} if masked else {})}
    for name, count in bits.items():
        array = plan.arrays[name]
        if array.dtype != np.uint8 or array.shape != (-(-count // 8),):
            return f"its launch plan has a {name} of another size"
    places, parts = segments(call, plan)
    if len(set(places)) != len(places):
        return "its launch plan puts two requests into one place"
    if [slots.size for part in parts for slots in part.slots] != [r.count for r in rows]:
        return "its launch plan places another number of KV rows than the call holds"
    return None
