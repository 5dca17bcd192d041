"""Conventions are declared by an adapter, then checked: one row a layer, recomputed in float64.

An adapter that names the wrong LSE base, forgets a sink or mistakes the scale makes a trace whose every later
verdict would be wrong in the same way. So the numbers are asked once, when the recording ends. Engines that
nobody has tested are asked before, by `recorder/first_launch.py`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tracekit.compare import Roundings, compare_envelope, diagnose, envelope
from tracekit.errors import ConventionContradicted
from tracekit.model import AttentionCall, Bits, Origin, Output
from tracekit.verdict import Place


@dataclass(frozen=True)
class Finding:
    """What came of holding a call against its declared conventions.

    Args:
        judged: elements that were held against a bound.
        place: the first element outside, or None.
        fits: the reading that would fit, where one is known.
    """

    judged: int
    place: Place | None
    fits: str | None = None


def hold(call: AttentionCall) -> Finding:
    """Hold the executed O and LSE of a call against the envelope of what it declares (docs/verdicts.md)."""
    declared = call.conventions
    bound = envelope(call, Roundings(declared.score_dtype, declared.probability_dtype))
    out, lse = _executed(call.out), _executed(call.lse)
    found = compare_envelope(call, bound, out, lse, declared)
    place = found.outside.first
    fits = None if place is None else diagnose(bound, out, lse, declared)
    return Finding(found.inside.compared.elements, place, fits)


def contradictions(calls: Iterable[AttentionCall]) -> Iterator[ConventionContradicted]:
    """Yield an error for each layer whose executed O or LSE does not fit what was declared.

    The first call of a layer is asked, at the row that reads the most keys.
    """
    seen: set[int] = set()
    for call in calls:
        if call.layer in seen or (_executed(call.out) is None and _executed(call.lse) is None):
            continue
        seen.add(call.layer)
        error = _check(call.take(np.array([int(np.argmax(call.selection.counts()))])))
        if error is not None:
            yield error


def _check(row: AttentionCall) -> ConventionContradicted | None:
    found = hold(row)
    place = found.place
    if place is None:
        return None
    return ConventionContradicted(
        f"layer {row.layer}, request {place.request}, position {place.position}: {place.tensor} of "
        f"{row.provenance.executed.kernel} is {place.actual!r} where the declared conventions give "
        f"{place.expected!r}; {found.fits or 'no known convention fits'}. Correct what the adapter declares "
        "(scale, sink, LSE base) before using this trace.",
        rule="R-CONVENTION",
        layer=row.layer,
        fits=found.fits or "",
        place=place.to_dict(),
    )


def _executed(output: Output | None) -> Bits | None:
    return output.bits if output is not None and output.origin is Origin.EXECUTED else None
