"""One call of a transformers attention function, in the logical words of the model."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tracekit.engines.torch_bits import borrow, own, take_rows, torch_kind
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
from tracekit.recorder.observation import Borrowed, Handle, Launch, Observation, SeenKV, check_dtypes

_TENSORS = {"s_aux", "position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k"}
"""Tensor arguments that are understood, or that the recorded kernels do not read."""
_PARTS = {"q": "q", "keys": "k", "values": "v", "out": "out"}
_BIASES = ("softcap", "position_bias", "indices", "head_mask", "alibi")
"""Arguments that change the scores in a way that a trace does not say."""
_KNOWN = _TENSORS | set(_BIASES)


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


@dataclass(frozen=True, eq=False)
class Owned:
    """What is kept of a call: copies of its tensors, and what else its description needs.

    Args:
        kernel: what ran.
        module: the attention module.
        handles: the request of each batch place.
        slots: what the key slots held.
        reading: what the mask said.
        q: `[B, H, S, D]`.
        out: `[B, S, H, Dv]`.
        lse: `[B, S, H]` or None.
        sink: FP32 `[H]` or None.
        options: the arguments that say something of the launch.
        scalars: of the launch plan.
        device: where it ran.
        implementation: the attention that the model was set to.
        threads: of torch.
    """

    kernel: Kernel
    module: Any
    handles: list[Handle]
    slots: Slots
    reading: MaskReading
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    sink: Bits | None
    options: dict[str, Any]
    scalars: dict[str, Scalar]
    device: str
    implementation: str
    threads: int


def capture_call(kernel: Kernel, call: KernelCall, forward: Forward) -> Launch:
    """Return the logical side of a call; q, out and lse are copied now, KV is borrowed, the rest waits.

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
    layer = int(call.module.layer_idx)
    if not call.q.dtype == call.k.dtype == call.v.dtype == call.out.dtype:
        check_dtypes(
            layer,
            {name: torch_kind(getattr(call, part).dtype) for name, part in _PARTS.items()},
        )
    slots = _slots(call, forward)
    reading = _reading(kernel, call, forward, slots)
    sinks = call.kwargs.get("s_aux")
    owned = Owned(
        kernel,
        call.module,
        forward.handles,
        slots,
        reading,
        own(call.q),
        own(call.out),
        None if call.lse is None else own(call.lse),
        None if sinks is None else _sink(sinks),
        {name: call.kwargs.get(name) for name in ("scaling", "sliding_window")},
        _scalars(call, slots, forward),
        call.q.device.type,
        forward.implementation,
        torch.get_num_threads(),
    )
    size = owned.q.nbytes + owned.out.nbytes + (0 if owned.lse is None else owned.lse.nbytes)
    kv = {forward.handles[b]: _rows_read(call, slots, b) for b in slots.batch.present}
    return Launch(layer, kv, size, partial(describe, owned))


def describe(owned: Owned) -> Observation:
    """Return the observation of a call, without its KV."""
    batch, reading = owned.slots.batch, owned.reading
    place = {b: index for index, b in enumerate(batch.present)}
    q = take_rows(owned.q.transpose(1, 2), batch.row_slots, "q")
    identity = owned.kernel.identity(owned.device)
    lse = owned.lse
    return Observation(
        layer=int(owned.module.layer_idx),
        requests=tuple(owned.handles[b] for b in batch.present),
        request=np.array([place[b] for b in batch.sequence.tolist()], np.int32),
        positions=batch.positions,
        q=q,
        kv={},
        sink=owned.sink,
        selection=reading.selection,
        out=Output(take_rows(owned.out, batch.row_slots, "out"), Origin.EXECUTED),
        lse=None if lse is None else Output(take_rows(lse, batch.row_slots, "lse"), Origin.EXECUTED),
        conventions=_conventions(owned, q.dtype),
        provenance=Provenance(engine_name(), owned.implementation, identity, owned.threads, _details(owned)),
        launch=_plan(identity.kernel, owned),
    )


def _slots(call: KernelCall, forward: Forward) -> Slots:
    """What the key slots hold, found out once for all layers of a kind."""
    window = call.kwargs.get("sliding_window")
    compressor = getattr(call.module, "compressor", None)
    rate = None if compressor is None else int(compressor.compress_rate)
    key = (call.k.shape[2], window, compresses(call.module), rate)
    if key not in forward.derived:
        forward.derived[key] = key_slots(call.module, call.k.shape[2], window, forward)
    slots: Slots = forward.derived[key]
    return slots


def _reading(kernel: Kernel, call: KernelCall, forward: Forward, slots: Slots) -> MaskReading:
    """What the mask says, read once for all layers that get the same one."""
    causal = _causal(kernel, call)
    key = (id(call.mask), slots.keys, slots.family, slots.compressed_family, causal)
    if key not in forward.derived:
        # The mask is kept with its reading, so that its id stays its own for the rest of the forward.
        forward.derived[key] = (call.mask, read_mask(call.mask, slots, causal))
    reading: MaskReading = forward.derived[key][1]
    return reading


def _details(owned: Owned) -> dict[str, str]:
    """What a launch without its plan needs to be made as the engine would."""
    details = {"module": f"{type(owned.module).__module__}.{type(owned.module).__qualname__}"}
    if owned.scalars["sink_dtype"] is not None:
        details["sink_dtype"] = str(owned.scalars["sink_dtype"])
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


def _conventions(owned: Owned, dtype: DType) -> Conventions:
    kernel, scaling = owned.kernel, owned.options["scaling"]
    looks_back = _looks_back(owned.reading, owned.slots.batch.positions)
    return Conventions(
        scale_to_bits(float(owned.q.shape[-1] ** -0.5 if scaling is None else scaling)),
        causal=bool(owned.scalars["module_is_causal"]) and looks_back,
        window=owned.options["sliding_window"],
        output_boundary="before inverse rope" if compresses(owned.module) else "attention core",
        score_dtype=dtype if kernel.own_scores else DType.FLOAT32,
        probability_dtype=dtype if kernel.own_probabilities else DType.FLOAT32,
        # k and v are the very arguments of the kernel, whatever the cache did to them before.
        kv_source=KVSource.CONSUMED,
    )


def check_cache(index: int, cache: Any, forward: Forward) -> None:
    """Refuse a cache whose rows cannot be placed in a layer.

    Raises:
        Unsupported: `T-CACHE`.
    """
    if cache is None:
        return
    layers = getattr(cache, "layers", None)
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
    kwargs = call.kwargs
    bias = next((b for b in _BIASES if kwargs.get(b) is not None), None)
    unknown = [k for k, v in kwargs.items() if k not in _KNOWN and isinstance(v, torch.Tensor)]
    plain = bias is None and not unknown and not kwargs.get("dropout")
    if plain and not (kernel is SDPA and kwargs.get("s_aux") is not None):
        return
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


def _sink(sinks: torch.Tensor) -> Bits:
    bits = borrow(sinks, "sinks")
    return Bits.from_float32(Bits(bits.data.copy(), bits.dtype).to_float32(), DType.FLOAT32)


def _scalars(call: KernelCall, slots: Slots, forward: Forward) -> dict[str, Scalar]:
    """What a launch plan says of the arguments besides arrays, found out once for all layers that agree."""
    q, k, v, sinks = call.q, call.k, call.v, call.kwargs.get("s_aux")
    options = tuple(call.kwargs.get(name) for name in ("scaling", "is_causal", "sliding_window"))
    key = (
        *(slots, q.stride(), k.stride(), v.stride(), v.storage_offset(), k.shape[1], v.shape[3]),
        *(
            q.shape[1],
            options,
            q.requires_grad,
            call.module.training,
            getattr(call.module, "is_causal", True),
        ),
        None if sinks is None else sinks.dtype,
    )
    if key not in forward.derived:
        forward.derived[key] = _read_scalars(call, slots)
    scalars: dict[str, Scalar] = forward.derived[key]
    return scalars


def _read_scalars(call: KernelCall, slots: Slots) -> dict[str, Scalar]:
    sinks = call.kwargs.get("s_aux")
    return {
        "batch": call.q.shape[0],
        "query_length": call.q.shape[2],
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
        "sink_dtype": None if sinks is None else str(sinks.dtype).removeprefix("torch."),
    }


def _plan(kernel: str, owned: Owned) -> LaunchPlan:
    slots, reading = owned.slots, owned.reading
    scalars = {**owned.scalars, **reading.scalars}
    if slots.compressed_family is not None:
        scalars["compressed_length"] = slots.compressed
    arrays = {"key_real": np.packbits(slots.real_keys.reshape(-1)), **reading.arrays}
    queries = slots.batch.real.shape[0] * slots.batch.queries
    return LaunchPlan(kernel, slots.batch.row_slots, queries, scalars=scalars, arrays=arrays)


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
