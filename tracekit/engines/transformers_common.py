"""What the calls of one forward have in common: slots, mask and arguments, read once for all like layers."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tracekit.engines.torch_bits import torch_kind
from tracekit.engines.transformers_families import Slots, compresses, key_slots
from tracekit.engines.transformers_kernel import EAGER, SDPA, Arguments, Kernel
from tracekit.engines.transformers_mask import MaskReading, read_mask
from tracekit.engines.transformers_rows import Place, places
from tracekit.engines.transformers_step import Forward
from tracekit.errors import Unsupported
from tracekit.model.launch_plan import Scalar
from tracekit.recorder.observation import check_dtypes

_TENSORS = {"s_aux", "position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k"}
"""Tensor arguments that are understood, or that the recorded kernels do not read."""
_BIASES = ("softcap", "position_bias", "indices", "head_mask", "alibi")
"""Arguments that change the scores in a way that a trace does not say."""
_PLAIN = (int, float, str, torch.dtype, type(None))
"""Arguments of these types are what they say."""
_KNOWN = _TENSORS | set(_BIASES)


@dataclass(frozen=True, eq=False)
class Common:
    """What holds for every call of a forward that is alike but for the bits of its tensors.

    Args:
        kernel: what ran.
        slots: what the key slots held.
        given: what the mask said; None where there was none and no padding, so that nothing can be refused.
        causal: what the kernel does without a mask.
        scalars: of the launch plan.
        scaling: as passed.
        window: the sliding window, as passed.
        device: where it ran.
        implementation: the attention that the model was set to.
        threads: of torch.
        places: where the rows of each request stand; None where each launch is looked at by itself.
        seen: the objects whose ids stand for them, which keeps the ids theirs.
    """

    kernel: Kernel
    slots: Slots
    given: MaskReading | None
    causal: bool
    scalars: dict[str, Scalar]
    scaling: float | None
    window: int | None
    device: str
    implementation: str
    threads: int
    places: list[Place] | None
    seen: object

    @cached_property
    def reading(self) -> MaskReading:
        """What each row read; made when the engine has finished, where it can wait."""
        return self.given or read_mask(None, self.slots, self.causal)


def common(kernel: Kernel, call: Arguments, forward: Forward) -> Common:
    """Return what is known of a call besides its bits.

    Raises:
        Unsupported: the call does something that a trace cannot say.
        InvalidCall: dtypes or the mask do not fit.
    """
    if not call.q.dtype is call.k.dtype is call.v.dtype is call.out:
        kinds = {"q": call.q.dtype, "keys": call.k.dtype, "values": call.v.dtype, "out": call.out}
        check_dtypes(int(call.module.layer_idx), {name: torch_kind(kind) for name, kind in kinds.items()})
    key = _key(kernel, call)
    found: Common | None = forward.derived.get(key)
    if found is None:
        found = forward.derived[key] = _read(kernel, call, forward)
    return found


def _key(kernel: Kernel, call: Arguments) -> tuple[object, ...]:
    """All that `_read` looks at. Numbers and words stand for themselves, other objects are told by their ids.

    The sinks are each layer's own; of them only the dtype is read here.
    """
    q, k, v, module = call.q, call.k, call.v, call.module
    arguments = [
        value if isinstance(value, _PLAIN) else value.dtype if name == "s_aux" else id(value)
        for name, value in call.kwargs.items()
    ]
    return (
        *(kernel.name, type(module), id(call.mask), *call.kwargs, *arguments, q),
        *(k.shape, v.shape, k.stride(), v.stride(), v.storage_offset(), module.training),
        *(getattr(module, "is_causal", True), _rate(module), torch.get_num_threads()),
    )


def _read(kernel: Kernel, call: Arguments, forward: Forward) -> Common:
    _refuse(kernel, call)
    if call.q.shape[2] != forward.queries or call.q.shape[0] != len(forward.handles):
        raise Unsupported(
            f"q is {list(call.q.shape)} in a forward of {len(forward.handles)} x {forward.queries} tokens; "
            "cross-attention is not recorded.",
            rule="T-QUERY",
        )
    slots, causal = _slots(call, forward), _causal(kernel, call)
    waits = call.mask is None and slots.batch.full
    return Common(
        kernel,
        slots,
        None if waits else _reading(call, forward, slots, causal),
        causal,
        _scalars(call, slots),
        call.kwargs.get("scaling"),
        call.kwargs.get("sliding_window"),
        call.q.device,
        forward.implementation,
        torch.get_num_threads(),
        places(call, slots, forward.handles),
        (call.mask, call.kwargs),
    )


def _rate(module: Any) -> int | None:
    """Tokens of one compressed row, None for a module without a compressor."""
    compressor = module._modules.get("compressor")  # asking a module for what it lacks is slow
    return None if compressor is None else int(compressor.compress_rate)


def _slots(call: Arguments, forward: Forward) -> Slots:
    """What the key slots hold, found out once for all layers of a kind."""
    window = call.kwargs.get("sliding_window")
    key = (call.k.shape[2], window, compresses(call.module), _rate(call.module))
    if key not in forward.derived:
        forward.derived[key] = key_slots(call.module, call.k.shape[2], window, forward)
    slots: Slots = forward.derived[key]
    return slots


def _reading(call: Arguments, forward: Forward, slots: Slots, causal: bool) -> MaskReading:
    """What the mask says, read once for all layers that get the same one."""
    key = (id(call.mask), slots.keys, slots.family, slots.compressed_family, causal)
    if key not in forward.derived:
        # The mask is kept with its reading, so that its id stays its own for the rest of the forward.
        forward.derived[key] = (call.mask, read_mask(call.mask, slots, causal))
    reading: MaskReading = forward.derived[key][1]
    return reading


def _refuse(kernel: Kernel, call: Arguments) -> None:
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


def _causal(kernel: Kernel, call: Arguments) -> bool:
    """Whether the kernel masks the future itself when it gets no mask. eager never does."""
    if kernel is EAGER or call.q.shape[2] == 1:
        return False
    passed = call.kwargs.get("is_causal")
    return bool(getattr(call.module, "is_causal", True) if passed is None else passed)


def _scalars(call: Arguments, slots: Slots) -> dict[str, Scalar]:
    """What a launch plan says of the arguments besides arrays."""
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
        "grad": call.q.grad,
        "q_layout": _layout(call.q.shape, call.q.strides),
        "kv_layout": _layout(call.k.shape, call.k.stride()),
        **_value_layout(call.v),
        "sink_dtype": None if sinks is None else str(sinks.dtype).removeprefix("torch."),
    }


def _value_layout(tensor: torch.Tensor) -> dict[str, Scalar]:
    """The order of the axes of v; for a part of wider rows (a head's keys and values in one) also which."""
    layout = _layout(tensor.shape, tensor.stride())
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


def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """The order of the axes in memory, slowest first; `other` strides are not recorded."""
    if _in_order(shape, strides, (0, 1, 2, 3)):
        return "bhsd"
    return "bshd" if _in_order(shape, strides, (0, 2, 1, 3)) else "other"


def _in_order(shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether elements lie without gaps, the last of the axes fastest; axes of one element lie anywhere."""
    behind = 1
    for axis in reversed(axes):
        if shape[axis] != 1 and strides[axis] != behind:
            return 0 in shape
        behind *= shape[axis]
    return True
