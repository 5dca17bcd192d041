"""What a launch of vLLM's attention must be to be recorded, whichever implementation runs it."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from tracekit.engines.vllm_step import Step
from tracekit.errors import Unsupported
from tracekit.model import Array


def refuse_arguments(name: str, impl: Any, metadata: Any, more: Iterable[tuple[bool, str]]) -> None:
    """Refuse what a trace cannot say.

    Args:
        name: of the layer.
        impl: the implementation.
        metadata: of the launch.
        more: what else is wrong with it, by what is said of the layer then.

    Raises:
        Unsupported: `V-ARGUMENT`.
    """
    kind = getattr(impl, "attn_type", "decoder")
    kind = getattr(kind, "value", kind)
    checks = (
        (impl.alibi_slopes is not None, "uses ALiBi, a bias on the scores"),
        (bool(impl.logits_soft_cap), f"caps its scores softly at {impl.logits_soft_cap}"),
        (kind != "decoder", f"is {kind} attention"),
        (metadata.causal is not True, "is not causal"),
        *more,
    )
    found = next((what for wrong, what in checks if wrong), None)
    if found is not None:
        raise Unsupported(
            f"layer {name} {found}, which is not recorded; record a model or a setting without it.",
            rule="V-ARGUMENT",
            layer=name,
        )


def check_rows(name: str, starts: Array, lengths: Array, step: Step) -> None:
    """The kernel's own lengths must say what the runner's buffers say.

    Args:
        name: of the layer.
        starts: int `[R + 1]`, the first row of each request.
        lengths: int `[R]`, tokens of each, those of this launch included.
        step: the rows of the model's input.

    Raises:
        Unsupported: `V-ROWS`.
    """
    counts = np.diff(starts)
    places = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    at = np.arange(places.size) - np.repeat(starts[1:], counts) + lengths[places]
    if starts[0] != 0 or not (np.array_equal(places, step.request) and np.array_equal(at, step.positions)):
        raise Unsupported(
            f"layer {name} was launched for rows {starts.tolist()[:6]} and lengths {lengths.tolist()[:6]}, "
            f"which are not the {step.positions.size} rows of the model's input.",
            rule="V-ROWS",
            layer=name,
        )
