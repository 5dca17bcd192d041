"""Name the convention that an answer follows, when it is not the declared one.

Each candidate is a known way to disagree (docs/verdicts.md). It is named only if it explains every
judged number: a name is a statement, not a guess.
"""

from collections.abc import Iterator

import numpy as np

from tracekit.compare.envelope import Envelope, Float64
from tracekit.model import Bits, Conventions, EmptyLse, LseBase

_EMPTY = {EmptyLse.NEGATIVE_INFINITY: "-inf", EmptyLse.POSITIVE_INFINITY: "+inf", EmptyLse.SINK: "the sink"}


def diagnose(bound: Envelope, out: Bits | None, lse: Bits | None, conventions: Conventions) -> str | None:
    """Return the convention that O and LSE follow instead of the declared one, or None if none fits.

    Args:
        bound: the envelope of the call.
        out: `[T, H, Dv]`, or None.
        lse: FP32 `[T, H]`, or None.
        conventions: what was declared.
    """
    if lse is not None:
        declared, radius = bound.declared_lse(conventions)
        if not _fits(lse, declared, radius, bound.usable):
            for name, center, other in _lse_candidates(bound, conventions):
                if _fits(lse, center, other, bound.usable):
                    return f"the LSE fits {name}"
    if out is not None and bound.sink is not None:
        usable = bound.usable[..., None]
        if not _fits(out, bound.out, bound.out_radius, usable):
            for name, factor in _sink_factors(bound):
                if _fits(out, bound.out * factor, bound.out_radius * factor + 2.0**-120, usable):
                    return f"O fits {name}"
    return None


def _lse_candidates(bound: Envelope, declared: Conventions) -> Iterator[tuple[str, Float64, Float64]]:
    """Every other reading of an LSE: name, `[T, H]`, radius `[T, H]`."""
    log2 = np.log(2.0)
    sinks = [("the sink not counted", bound.lse, bound.lse_radius)]
    if bound.sink is not None:
        once = np.logaddexp(bound.lse, bound.sink[None, :])
        sinks.append(("the sink counted", once, bound.lse_sink_radius))
        twice = np.logaddexp(once, bound.sink[None, :])
        sinks.append(("the sink counted twice", twice, bound.lse_sink_radius))
    empty = np.isneginf(bound.lse)
    values = {EmptyLse.NEGATIVE_INFINITY: np.float64(-np.inf), EmptyLse.POSITIVE_INFINITY: np.float64(np.inf)}
    for base, factor in ((LseBase.NATURAL, 1.0), (LseBase.TWO, 1.0 / log2)):
        for sink, lse, radius in sinks:
            for kind, value in values.items():
                if kind is not EmptyLse.NEGATIVE_INFINITY and not empty.any():
                    continue
                parts = []
                if base is not declared.lse_base:
                    change = "×1/ln 2" if base is LseBase.TWO else "×ln 2"
                    parts.append(f"base {'2' if base is LseBase.TWO else 'e'} ({change})")
                if bound.sink is not None:
                    parts.append(sink)
                if empty.any() and kind is not declared.empty_lse:
                    parts.append(f"{_EMPTY[kind]} for rows without keys")
                center = np.where(empty, value, lse * factor)
                yield ", ".join(parts) or "the declared form", center, radius * factor
            if bound.sink is not None and empty.any():
                center = np.where(empty, bound.sink[None, :], lse * factor)
                yield f"{sink}, the sink for rows without keys", center, radius * factor


def _sink_factors(bound: Envelope) -> Iterator[tuple[str, Float64]]:
    """O without the sink, and with the sink twice, as factors on the exact O, `[T, H, 1]`."""
    assert bound.sink is not None
    with np.errstate(over="ignore", invalid="ignore"):
        weight = np.exp(bound.sink[None, :] - bound.lse)[..., None]  # of the sink, against all keys
        yield "no sink in the denominator", np.where(np.isfinite(weight), 1.0 + weight, 1.0)
        yield (
            "the sink twice in the denominator",
            np.where(np.isfinite(weight), (1.0 + weight) / (1.0 + 2.0 * weight), 1.0),
        )


def _fits(actual: Bits, center: Float64, radius: Float64, usable: np.ndarray) -> bool:
    with np.errstate(all="ignore"):
        value = actual.to_float64()
        inside = (value == center) | (np.abs(value - center) <= radius)
    judged = np.broadcast_to(usable, value.shape)
    return bool(judged.any() and inside[judged].all())
