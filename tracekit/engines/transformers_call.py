"""One call of a transformers attention function, in the logical words of the model."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tracekit.engines.torch_bits import borrow, take_rows
from tracekit.engines.transformers_backend import IDENTITY
from tracekit.engines.transformers_families import Slots, compresses, key_slots
from tracekit.engines.transformers_mask import MaskReading, read_mask
from tracekit.engines.transformers_step import CACHE_LAYERS, Forward
from tracekit.errors import Unsupported
from tracekit.model import (
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
    Ranges,
    scale_to_bits,
)
from tracekit.model.launch_plan import Scalar
from tracekit.providers.transformers_identity import engine_name, executed
from tracekit.recorder.observation import Borrowed, Observation, SeenKV

_TENSORS = {"s_aux", "position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k"}
"""Tensor arguments that are understood, or that the recorded kernels do not read."""
_BIASES = ("softcap", "position_bias", "indices", "head_mask", "alibi")
"""Arguments that change the scores in a way that a trace does not say."""


@dataclass(frozen=True)
class Kernel:
    """An attention function as the recorder knows it.

    Args:
        name: `sdpa`, `eager` or `tracekit`: the name in transformers' table.
        own_scores: whether scores are held in the dtype of q (else in FP32).
        own_probabilities: whether P meets V in the dtype of q (else in FP32).
        portable: whether it is TKA-1, whose bits depend on nothing here.
    """

    name: str
    own_scores: bool
    own_probabilities: bool
    portable: bool = False

    def identity(self, device: str) -> ExecutedIdentity:
        """What ran, when this kernel ran here."""
        return IDENTITY if self.portable else executed(f"transformers.{self.name}", device)


SDPA = Kernel("sdpa", own_scores=False, own_probabilities=True)
"""torch's fused CPU kernel keeps scores in FP32 and casts P to the dtype of V for the second product."""
EAGER = Kernel("eager", own_scores=True, own_probabilities=True)
"""q @ k is a tensor of the model's dtype, and so is P before it meets V."""


TKA1 = Kernel("tracekit", own_scores=False, own_probabilities=False, portable=True)
"""TKA-1, served by `transformers_backend`."""


@dataclass(frozen=True, eq=False)
class KernelCall:
    """The arguments and the answer of one attention function call.

    Args:
        module: the attention module.
        q: `[B, H, S, D]`.
        k: `[B, Hkv, T, D]`.
        v: `[B, Hkv, T, Dv]`.
        mask: as passed.
        kwargs: as passed.
        out: `[B, S, H, Dv]`.
        lse: `[B, S, H]` FP32 where the kernel gave one.
    """

    module: Any
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    kwargs: dict[str, Any]
    out: torch.Tensor
    lse: torch.Tensor | None = None


def observe_call(kernel: Kernel, call: KernelCall, forward: Forward) -> Observation:
    """Return the logical side of a call; q, out and lse are copies, KV is borrowed.

    Raises:
        Unsupported: the call does something that a trace cannot say.
        InvalidCall: dtypes or masks do not fit.
    """
    _refuse(kernel, call)
    if call.q.shape[2] != forward.queries or call.q.shape[0] != len(forward.handles):
        raise Unsupported(
            f"q is {list(call.q.shape)} in a forward of {len(forward.handles)} x {forward.queries} tokens; "
            "cross-attention is not recorded.",
            rule="T-QUERY",
        )
    slots = key_slots(call.module, call.k.shape[2], call.kwargs.get("sliding_window"), forward)
    batch, reading = slots.batch, _reading(kernel, call, forward, slots)
    present, request = np.unique(batch.sequence, return_inverse=True)
    q = take_rows(call.q.transpose(1, 2), batch.row_slots, "q")
    sinks = call.kwargs.get("s_aux")
    identity = kernel.identity(call.q.device.type)
    return Observation(
        layer=int(call.module.layer_idx),
        requests=tuple(forward.handles[b] for b in present),
        request=request.astype(np.int32),
        positions=batch.positions,
        q=q,
        kv={forward.handles[b]: _rows_read(call, slots, int(b)) for b in present},
        sink=None if sinks is None else _sink(sinks),
        selection=reading.selection,
        out=Output(take_rows(call.out, batch.row_slots, "out"), Origin.EXECUTED),
        lse=None
        if call.lse is None
        else Output(take_rows(call.lse, batch.row_slots, "lse"), Origin.EXECUTED),
        conventions=_conventions(kernel, call, q.dtype, reading, batch.positions),
        provenance=Provenance(
            engine_name(),
            str(call.module.config._attn_implementation),
            identity,
            torch.get_num_threads(),
            _details(call),
        ),
        launch=_plan(identity.kernel, call, slots, reading),
    )


def _reading(kernel: Kernel, call: KernelCall, forward: Forward, slots: Slots) -> MaskReading:
    """What the mask says, read once for all layers that get the same one."""
    causal = _causal(kernel, call)
    key = (id(call.mask), slots.keys, slots.family, slots.compressed_family, causal)
    if key not in forward.derived:
        # The mask is kept with its reading, so that its id stays its own for the rest of the forward.
        forward.derived[key] = (call.mask, read_mask(call.mask, slots, causal))
    reading: MaskReading = forward.derived[key][1]
    return reading


def _details(call: KernelCall) -> dict[str, str]:
    """What a launch without its plan needs to be made as the engine would."""
    details = {"module": f"{type(call.module).__module__}.{type(call.module).__qualname__}"}
    sinks = call.kwargs.get("s_aux")
    if sinks is not None:
        details["sink_dtype"] = str(sinks.dtype).removeprefix("torch.")
    return details


def _rows_read(call: KernelCall, slots: Slots, b: int) -> dict[KVFamily, SeenKV]:
    """The KV rows of batch place b, family by family; one tensor where keys and values are one."""
    keys = borrow(call.k, "keys")
    values = None if call.v is call.k else borrow(call.v, "values")

    def rows(held: Any, first: int) -> SeenKV:
        tensors = (
            None if part is None else Borrowed(part.data[b][:, held], part.dtype) for part in (keys, values)
        )
        k, v = tensors
        assert k is not None
        return SeenKV(k, v, first)

    batch = slots.batch
    token_slots = batch.key_slots(b)
    families = {slots.family: rows(token_slots, batch.first_key(b))}
    if slots.compressed_family is not None:
        families[slots.compressed_family] = rows(slice(batch.keys, slots.keys), 0)
    return families


def _conventions(
    kernel: Kernel, call: KernelCall, dtype: DType, reading: MaskReading, positions: npt.NDArray[np.int64]
) -> Conventions:
    return Conventions(
        scale_to_bits(_scale(call)),
        causal=bool(getattr(call.module, "is_causal", True)) and _looks_back(reading, positions),
        window=call.kwargs.get("sliding_window"),
        output_boundary="before inverse rope" if compresses(call.module) else "attention core",
        score_dtype=dtype if kernel.own_scores else DType.FLOAT32,
        probability_dtype=dtype if kernel.own_probabilities else DType.FLOAT32,
        # k and v are the very arguments of the kernel, whatever the cache did to them before.
        kv_source=KVSource.CONSUMED,
    )


def check_cache(module: Any, cache: Any, forward: Forward) -> None:
    """Refuse a cache whose rows cannot be placed.

    Raises:
        Unsupported: `T-CACHE`.
    """
    if cache is None:
        return
    layers = getattr(cache, "layers", None)
    index = module.layer_idx
    layer = layers[index] if layers is not None and index < len(layers) else None
    if layers is None or (layer is not None and type(layer).__name__ not in CACHE_LAYERS):
        raise Unsupported(
            f"the cache of layer {index} is a {type(cache if layer is None else layer).__name__}; tracekit "
            f"places rows of {' and '.join(sorted(CACHE_LAYERS))}: pass a DynamicCache.",
            rule="T-CACHE",
            layer=index,
        )
    held = 0 if layer is None else int(layer.get_seq_length())
    if held != forward.past:
        raise Unsupported(
            f"the cache of layer {index} has seen {held} tokens, the model {forward.past}; "
            "each layer of a forward must continue at the same token.",
            rule="T-CACHE",
            layer=index,
        )


def _refuse(kernel: Kernel, call: KernelCall) -> None:
    name = type(call.module).__name__
    bias = next((b for b in _BIASES if call.kwargs.get(b) is not None), None)
    unknown = [
        k for k, v in call.kwargs.items() if isinstance(v, torch.Tensor) and k not in (*_TENSORS, *_BIASES)
    ]
    checks = (
        (bias is not None, f"passes {bias}, which changes the scores"),
        (bool(unknown), f"passes {', '.join(unknown)}, which tracekit does not know"),
        (call.kwargs.get("dropout", 0.0) not in (0.0, None), "uses dropout, which no replay can repeat"),
        (kernel is SDPA and call.kwargs.get("s_aux") is not None, "has sinks, which sdpa leaves out"),
    )
    found = next((what for wrong, what in checks if wrong), None)
    if found is not None:
        raise Unsupported(
            f"{name} {found}; it is not recorded with {kernel.name}.", rule="T-ARGUMENT", module=name
        )


def _causal(kernel: Kernel, call: KernelCall) -> bool:
    """Whether the kernel masks the future itself when it gets no mask. eager never does."""
    if kernel is EAGER or call.q.shape[2] == 1:
        return False
    passed = call.kwargs.get("is_causal")
    return bool(getattr(call.module, "is_causal", True) if passed is None else passed)


def _looks_back(reading: MaskReading, positions: npt.NDArray[np.int64]) -> bool:
    """Whether no row reads a later one: what was executed, whatever the module calls itself."""
    for family, part in reading.selection.families.items():
        visible = (positions + 1) // family.ratio
        if isinstance(part, Ranges):
            back = bool((part.hi <= visible).all())
        else:
            back = bool((part.ids < np.repeat(visible, np.diff(part.offsets))).all())
        if not back:
            return False
    return True


def _scale(call: KernelCall) -> float:
    scaling = call.kwargs.get("scaling")
    return float(call.q.shape[-1] ** -0.5 if scaling is None else scaling)


def _sink(sinks: torch.Tensor) -> Bits:
    bits = borrow(sinks, "sinks")
    return Bits.from_float32(Bits(bits.data.copy(), bits.dtype).to_float32(), DType.FLOAT32)


def _plan(kernel: str, call: KernelCall, slots: Slots, reading: MaskReading) -> LaunchPlan:
    batch = slots.batch
    scalars: dict[str, Scalar] = {
        "batch": batch.real.shape[0],
        "query_length": batch.queries,
        "key_length": slots.keys,
        "scaling": call.kwargs.get("scaling"),
        "is_causal": call.kwargs.get("is_causal"),
        "module_is_causal": bool(getattr(call.module, "is_causal", True)),
        "groups": call.q.shape[1] // call.k.shape[1],
        "sliding_window": call.kwargs.get("sliding_window"),
        "training": bool(call.module.training),
        "grad": bool(call.q.requires_grad),
        "q_layout": _layout(call.q),
        "kv_layout": _layout(call.k),
        **_value_layout(call.v),
        "sink_dtype": _details(call).get("sink_dtype"),
        **reading.scalars,
    }
    if slots.compressed_family is not None:
        scalars["compressed_length"] = slots.compressed
    arrays = {"key_real": np.packbits(slots.real_keys.reshape(-1)), **reading.arrays}
    queries = batch.real.shape[0] * batch.queries
    return LaunchPlan(kernel, batch.row_slots, queries, scalars=scalars, arrays=arrays)


def _value_layout(tensor: torch.Tensor) -> dict[str, Scalar]:
    """The order of the axes of v; for a part of wider rows (a head's keys and values in one) also which."""
    layout = _layout(tensor)
    _, heads, keys, dim = tensor.shape
    row = tensor.stride(1) if heads > 1 else tensor.stride(2)
    if layout != "other" or row <= dim:
        return {"v_layout": layout}
    skip = int(tensor.storage_offset()) % row
    ordered = (keys * heads * row, row, heads * row, 1)
    real = zip(tensor.shape, tensor.stride(), ordered, strict=True)
    if skip + dim > row or any(size > 1 and stride != wanted for size, stride, wanted in real):
        return {"v_layout": layout}
    return {"v_layout": "bshd", "v_row": row, "v_skip": skip}


def _layout(tensor: torch.Tensor) -> str:
    """The order of the axes in memory, slowest first; `other` strides are not recorded."""
    if tensor.is_contiguous():
        return "bhsd"
    return "bshd" if tensor.transpose(1, 2).is_contiguous() else "other"
