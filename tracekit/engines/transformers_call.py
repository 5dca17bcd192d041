"""One call of a transformers attention function, in the logical words of the model."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tracekit.engines.torch_bits import take_rows, widened
from tracekit.engines.transformers_common import Common
from tracekit.engines.transformers_families import compresses
from tracekit.engines.transformers_kernel import Arguments
from tracekit.engines.transformers_mask import MaskReading
from tracekit.engines.transformers_rows import rows_read
from tracekit.engines.transformers_step import CACHE_LAYERS, Forward
from tracekit.engines.transformers_waiting import Copies
from tracekit.errors import Unsupported
from tracekit.model import (
    Bits,
    Conventions,
    DType,
    KVSource,
    LaunchPlan,
    Origin,
    Output,
    Provenance,
    Ranges,
    scale_to_bits,
)
from tracekit.providers.transformers_identity import engine_name
from tracekit.recorder.observation import Handle, Launch, Observation


class Owned(NamedTuple):
    """What is kept of a call: copies of its tensors, and what else its description needs.

    Args:
        common: what it shares with other calls of its forward.
        layer: 0-based.
        module: name of the attention module's class.
        boundary: where O is taken.
        handles: the request of each batch place.
        copies: Q `[B, H, S, D]`, O `[B, S, H, Dv]`, LSE `[B, S, H]` or None.
        sink: FP32 `[H]` or None.
    """

    common: Common
    layer: int
    module: str
    boundary: str
    handles: list[Handle]
    copies: Copies
    sink: Bits | None


def capture_call(shared: Common, call: Arguments, forward: Forward, copies: Copies) -> Launch:
    """Return the logical side of a call; KV is borrowed, the rest waits.

    Args:
        shared: what it has in common with calls like it.
        call: its arguments.
        forward: that it belongs to.
        copies: of Q, O and LSE.

    Raises:
        Unsupported: `T-DTYPE`.
    """
    layer = int(call.module.layer_idx)
    sinks = call.kwargs.get("s_aux")
    owned = Owned(
        shared,
        layer,
        f"{type(call.module).__module__}.{type(call.module).__qualname__}",
        "before inverse rope" if compresses(call.module) else "attention core",
        forward.handles,
        copies,
        None if sinks is None else widened(sinks, "sinks"),
    )
    return Launch(
        layer,
        rows_read(call, shared.slots, forward.handles, shared.places),
        copies.nbytes,
        partial(describe, owned),
    )


def describe(owned: Owned) -> Observation:
    """Return the observation of a call, without its KV."""
    shared = owned.common
    batch = shared.slots.batch
    place = {b: index for index, b in enumerate(batch.present)}
    q = take_rows(owned.copies.q.tensor().transpose(1, 2), batch.row_slots, "q")
    identity = shared.kernel.identity(shared.device)
    lse = None if owned.copies.lse is None else owned.copies.lse.tensor()
    return Observation(
        layer=owned.layer,
        requests=tuple(owned.handles[b] for b in batch.present),
        request=np.array([place[b] for b in batch.sequence.tolist()], np.int32),
        positions=batch.positions,
        q=q,
        kv={},
        sink=owned.sink,
        selection=shared.reading.selection,
        out=Output(take_rows(owned.copies.out.tensor(), batch.row_slots, "out"), Origin.EXECUTED),
        lse=None if lse is None else Output(take_rows(lse, batch.row_slots, "lse"), Origin.EXECUTED),
        conventions=_conventions(owned, q.dtype),
        provenance=Provenance(
            engine_name(), shared.implementation, identity, shared.threads, _details(owned)
        ),
        launch=_plan(identity.kernel, shared),
    )


def _details(owned: Owned) -> dict[str, str]:
    """What a launch without its plan needs to be made as the engine would."""
    details = {"module": owned.module}
    if owned.common.scalars["sink_dtype"] is not None:
        details["sink_dtype"] = str(owned.common.scalars["sink_dtype"])
    return details


def _conventions(owned: Owned, dtype: DType) -> Conventions:
    shared = owned.common
    kernel, scaling = shared.kernel, shared.scaling
    looks_back = _looks_back(shared.reading, shared.slots.batch.positions)
    return Conventions(
        scale_to_bits(float(owned.copies.q.shape[-1] ** -0.5 if scaling is None else scaling)),
        causal=bool(shared.scalars["module_is_causal"]) and looks_back,
        window=shared.window,
        output_boundary=owned.boundary,
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


def _plan(kernel: str, shared: Common) -> LaunchPlan:
    slots, reading = shared.slots, shared.reading
    scalars = {**shared.scalars, **reading.scalars}
    if slots.compressed_family is not None:
        scalars["compressed_length"] = slots.compressed
    arrays = {"key_real": np.packbits(slots.real_keys.reshape(-1)), **reading.arrays}
    queries = slots.batch.real.shape[0] * slots.batch.queries
    return LaunchPlan(kernel, slots.batch.row_slots, queries, scalars=scalars, arrays=arrays)
