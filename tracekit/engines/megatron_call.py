"""One launch of a Megatron core attention, in the logical words of the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tracekit.engines import megatron_te
from tracekit.engines.megatron_mask import executed_mask, read_selection, slots_of_mask, visibility
from tracekit.engines.megatron_points import Core, Kind
from tracekit.engines.megatron_step import Forward, Slots
from tracekit.engines.patch import EVIDENCE
from tracekit.engines.torch_bits import borrow, widened
from tracekit.errors import Unsupported
from tracekit.model import (
    Array,
    Bits,
    Conventions,
    DType,
    ExecutedIdentity,
    KVFamily,
    KVSource,
    LaunchPlan,
    Lists,
    Origin,
    Output,
    Provenance,
    Ranges,
    Selection,
    scale_to_bits,
)
from tracekit.model.launch_plan import Scalar
from tracekit.providers.megatron_identity import DOT_PRODUCT, engine_name, executed
from tracekit.providers.portable import Tka1
from tracekit.recorder.observation import Borrowed, LateGradients, Observation, SeenKV


@dataclass(frozen=True, eq=False)
class CoreCall:
    """The arguments and the answer of one core attention.

    Args:
        core: the module.
        given: its arguments by name: `query` `[sq, b, np, hn]`, `key` and `value` `[sk, b, ng, hn]`, or
            `[t, np, hn]` of a packed launch.
        out: `[sq, b, np * hn]`, or `[t, np * hn]`.
        lse: FP32 `[sq, b, np]` or `[t, np]` where the kernel gave one.
    """

    core: Core
    given: Mapping[str, Any]
    out: torch.Tensor
    lse: torch.Tensor | None = None

    @property
    def query(self) -> torch.Tensor:
        """The queries, as passed."""
        query: torch.Tensor = self.given["query"]
        return query

    @property
    def sink(self) -> torch.Tensor | None:
        """The learned logit of each head, or the zero of `off-by-one`."""
        sink: torch.Tensor | None = getattr(self.core.module, "softmax_offset", None)
        return sink


def observe_call(call: CoreCall, forward: Forward, late: LateGradients | None) -> Observation:
    """Return the logical side of a launch; q, out and lse are copies, KV is borrowed.

    Raises:
        Unsupported: the launch does something that a trace cannot say.
        InvalidCall: dtypes do not fit.
    """
    refuse_call(call, forward)
    module, kind = call.core.module, call.core.kind
    selection, window = _selection(call, forward)
    q = rows(call.query, forward, "query")
    heads = q.shape[1]
    identity = _identity(kind, call.query.device.type)
    families = {
        handle: {KVFamily.DENSE: _held(call, forward, index)} for index, handle in enumerate(forward.handles)
    }
    return Observation(
        layer=call.core.layer,
        requests=forward.handles,
        request=forward.request,
        positions=forward.positions,
        q=q,
        kv=families,
        sink=None if call.sink is None else widened(call.sink, "softmax_offset"),
        selection=Selection({KVFamily.DENSE: selection}),
        out=Output(rows(call.out, forward, "output", heads), Origin.EXECUTED),
        lse=None if call.lse is None else Output(rows(call.lse, forward, "lse"), Origin.EXECUTED),
        conventions=_conventions(kind, module, q.dtype, selection, window, forward),
        provenance=Provenance(
            engine_name(),
            type(module).__name__,
            identity,
            torch.get_num_threads(),
            _details(call),
        ),
        launch=_plan(call, forward) if kind is Kind.DOT_PRODUCT else None,
        gradients=late,
    )


def flat(tensor: torch.Tensor, slots: Slots, name: str) -> Borrowed:
    """Return a tensor `[S, B, ...]`, or `[t, ...]` of a packed launch, as slots `[B * S, ...]`."""
    borrowed = borrow(tensor, name)
    data = borrowed.data
    if not slots.packed:
        data = data.swapaxes(0, 1)
        data = data.reshape(-1, *data.shape[2:])
    return Borrowed(data, borrowed.dtype)


def rows(tensor: torch.Tensor, slots: Slots, name: str, heads: int = 0) -> Bits:
    """Return an owned copy of the rows of a launch, `[T, ...]`; with `heads`, `[T, heads, ...]`."""
    every = flat(tensor, slots, name)
    taken = every.data[slots.row_slots]
    return Bits(taken.reshape(taken.shape[0], heads, -1) if heads else taken, every.dtype)


def kv_rows(tensor: torch.Tensor, slots: Slots, request: int, name: str) -> Borrowed:
    """Return the rows of one request of `[S, B, ng, hn]`, as `[ng, N, hn]`."""
    every = flat(tensor, slots, name)
    return Borrowed(every.data[slots.slots_of(request)].transpose(1, 0, 2), every.dtype)


def scale_of(kind: Kind, module: Any) -> float:
    """The factor on q.k in all: with `apply_query_key_layer_scaling` a part of it comes after the product.

    Raises:
        Unsupported: `M-HOOK`.
    """
    if kind is Kind.TRANSFORMER_ENGINE:
        return megatron_te.scale_of(module)
    coefficient = getattr(getattr(module, "scale_mask_softmax", None), "scale", None)
    return float(module.softmax_scale) * (1.0 if coefficient is None else float(coefficient))


def refuse_call(call: CoreCall, forward: Forward) -> None:
    """Refuse what a trace cannot say, and a launch that is not of this forward.

    Raises:
        Unsupported: `M-ARGUMENT`, `M-ROWS`.
    """
    module, given = call.core.module, call.given
    dropout = getattr(module, "attention_dropout", None)
    p = float(getattr(dropout, "p", dropout) or 0.0)
    fused = getattr(getattr(module, "scale_mask_softmax", None), "scaled_masked_softmax_fusion", False)
    checks = (
        (p > 0.0 and module.training, f"drops out {p:g} of the attention, which no replay can repeat"),
        (given.get("attention_bias") is not None, "passes a bias on the scores"),
        (getattr(module, "attention_type", "self") == "cross", "is cross attention"),
        (
            bool(fused) and call.query.device.type != "cpu",
            "may run a fused softmax, which was not seen by this recorder; set masked_softmax_fusion=False",
        ),
    )
    found = next((what for wrong, what in checks if wrong), None)
    if found is not None:
        raise Unsupported(f"{call.core.name} {found}.", rule="M-ARGUMENT", layer=call.core.layer)
    axes = 1 if forward.packed else 2
    batch, length = forward.batch, forward.length
    wanted = (length,) if forward.packed else (length, batch)
    for name in ("query", "key", "value"):
        shape = tuple(given[name].shape)
        if shape[:axes] != wanted or len(shape) != axes + 2:
            raise Unsupported(
                f"{call.core.name} was given a {name} of {list(shape)} in a forward of {batch} x {length} "
                f"tokens; {[*wanted, 'heads', 'size']} is recorded.",
                rule="M-ROWS",
                shape=list(shape),
            )


def _selection(call: CoreCall, forward: Forward) -> tuple[Ranges | Lists, int | None]:
    """What each row read, and the window of the layer; the same mask is read once a forward."""
    mask, window = executed_mask(call.core.kind, call.core.module, call.given, forward.packed)
    key = (id(mask), window)
    if key not in forward.readings:
        if call.core.kind is Kind.TKA1 and not forward.packed:
            _same_documents(slots_of_mask(mask, window, forward.batch, forward.length), forward)
        # The mask is kept with its reading, so that its id stays its own for the rest of the forward.
        forward.readings[key] = (mask, read_selection(mask, window, forward))
    selection: Ranges | Lists = forward.readings[key][1]
    return selection, window


def _same_documents(told: Slots, forward: Forward) -> None:
    """TKA-1 numbers rows by what its mask tells apart; the trace numbers them by the tokens.

    Raises:
        Unsupported: `M-DOCUMENTS`.
    """
    if np.array_equal(told.segment, forward.segment) and np.array_equal(told.place, forward.place):
        return
    raise Unsupported(
        "the mask tells other documents apart than position_ids do, so TKA-1 and the trace number the rows "
        "differently; restart position_ids where the mask begins a document (reset_position_ids).",
        rule="M-DOCUMENTS",
    )


def _held(call: CoreCall, forward: Forward, request: int) -> SeenKV:
    keys, values = (kv_rows(call.given[name], forward, request, f"{name}s") for name in ("key", "value"))
    return SeenKV(keys, values, 0, forward.recomputed)


def _identity(kind: Kind, device: str) -> ExecutedIdentity:
    if kind is Kind.TKA1:
        return Tka1().identity()
    name = DOT_PRODUCT if kind is Kind.DOT_PRODUCT else "transformer_engine.dot_product"
    return executed(name, device)


def _conventions(
    kind: Kind,
    module: Any,
    dtype: DType,
    selection: Ranges | Lists,
    window: int | None,
    forward: Forward,
) -> Conventions:
    """Scores of `DotProductAttention` are a tensor of the model's dtype, and so is P when it meets V."""
    place = forward.positions
    if isinstance(selection, Ranges):
        back = bool((selection.hi <= place + 1).all())
    else:
        back = bool((selection.ids <= np.repeat(place, np.diff(selection.offsets))).all())
    own = kind is Kind.DOT_PRODUCT
    return Conventions(
        scale_to_bits(scale_of(kind, module)),
        causal=back,
        window=window,
        score_dtype=dtype if own else DType.FLOAT32,
        probability_dtype=DType.FLOAT32 if kind is Kind.TKA1 else dtype,
        kv_source=KVSource.CONSUMED,
    )


def _details(call: CoreCall) -> dict[str, str]:
    """The module, and the dtype of its sink, which the numbers do not show."""
    details = {"module": call.core.name}
    if call.core.kind is Kind.TRANSFORMER_ENGINE:
        details["evidence"] = EVIDENCE
    if call.sink is not None:
        details["sink_dtype"] = str(call.sink.dtype).removeprefix("torch.")
    return details


def _plan(call: CoreCall, forward: Forward) -> LaunchPlan:
    """What `DotProductAttention` is made and called with; keys stand in the slots of their queries."""
    module = call.core.module
    softmax = module.scale_mask_softmax
    batch, length = forward.batch, forward.length
    # The mask that was executed: a layer with a window makes its own, whatever it is given.
    mask, window = executed_mask(call.core.kind, module, call.given, forward.packed)
    plain = mask is None and window is None
    hidden = None if plain else ~visibility(mask, window, batch, length)
    scalars: dict[str, Scalar] = {
        "batch": batch,
        "length": length,
        "softmax_scale": float(module.softmax_scale),
        "softmax_coefficient": None if softmax.scale is None else float(softmax.scale),
        "softmax_in_fp32": bool(softmax.softmax_in_fp32),
        "input_dtype": "float16" if softmax.input_in_fp16 else "bfloat16" if softmax.input_in_bf16 else None,
        "sink_dtype": _details(call).get("sink_dtype"),
        "grad": bool(call.out.requires_grad),
        "mask_batch": 0 if hidden is None else len(hidden),
    }
    arrays: dict[str, Array] = {
        f"{name}_strides": np.array(call.given[name].stride(), np.int64) for name in ("query", "key", "value")
    }
    if hidden is not None:
        arrays["mask"] = np.packbits(hidden.reshape(-1))
    return LaunchPlan(DOT_PRODUCT, forward.row_slots, batch * length, scalars=scalars, arrays=arrays)
