"""Hold an answer against an envelope: what lies outside, and how many ULPs the rest is off."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tracekit.compare import ulp
from tracekit.compare.bits import Comparison, place_at
from tracekit.compare.envelope import Envelope, Float64
from tracekit.model import AttentionCall, Bits, Conventions, DType
from tracekit.verdict import Compared, Differences, Place

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Bounded:
    """What a comparison with an envelope found.

    Args:
        inside: elements compared, how far O is from the rounded exact O in ULPs, no place.
        outside: only the elements outside, with the first place.
        worst: the largest error as a part of its bound.
        skipped: rows with at least one head that has no usable bound.
    """

    inside: Comparison = field(default_factory=Comparison)
    outside: Comparison = field(default_factory=Comparison)
    worst: float = 0.0
    skipped: int = 0

    def __add__(self, other: "Bounded") -> "Bounded":
        return Bounded(
            self.inside + other.inside,
            self.outside + other.outside,
            max(self.worst, other.worst),
            self.skipped + other.skipped,
        )


def compare_envelope(
    call: AttentionCall,
    bound: Envelope,
    out: Bits | None,
    lse: Bits | None,
    conventions: Conventions | None = None,
) -> Bounded:
    """Hold an answer against an envelope.

    Args:
        call: the call, for identities.
        bound: its envelope.
        out: `[T, H, Dv]`, or None to leave O out.
        lse: FP32 `[T, H]`, or None.
        conventions: what the LSE means; natural, sink not counted, -inf for empty rows where absent.
    """
    conventions = conventions or Conventions(call.conventions.scale_bits)
    held = [_hold(answer, bound.usable) for answer in _answers(bound, out, lse, conventions)]
    elements = sum(int(np.count_nonzero(one.judged)) for one in held)
    rows = int(np.count_nonzero(bound.usable.any(axis=1)))
    compared = Compared(len(held), elements, rows) if elements else Compared()
    shown = [one.steps(one.judged) if one.answer.name == "out" else () for one in held]
    inside = _differences(held, [one.different for one in held], [one.judged for one in held], shown)
    outside = [one.outside for one in held]
    return Bounded(
        Comparison(compared, inside),
        Comparison(
            compared,
            _differences(held, outside, outside, [one.steps(one.outside) for one in held]),
            _first(call, held),
        ),
        max((one.worst for one in held), default=0.0),
        int(np.count_nonzero(~bound.usable.all(axis=1))),
    )


@dataclass(frozen=True, eq=False)
class _Answer:
    """One tensor beside its exact value, the radius around it, and the exact value rounded."""

    name: str
    actual: Bits
    center: Float64
    radius: Float64
    rounded: Bits


@dataclass(frozen=True, eq=False)
class _Held:
    """One tensor held against its envelope, element by element."""

    answer: _Answer
    judged: Flags
    outside: Flags
    different: Flags
    ulps: npt.NDArray[np.int64]
    special: npt.NDArray[np.uint8]
    worst: float

    def steps(self, among: Flags) -> ulp.Histogram:
        return ulp.histogram(self.ulps[among], self.special[among])


def _answers(
    bound: Envelope, out: Bits | None, lse: Bits | None, conventions: Conventions
) -> Iterator[_Answer]:
    if out is not None:
        yield _Answer("out", out, bound.out, bound.out_radius, bound.rounded)
    if lse is not None:
        center, radius = bound.declared_lse(conventions)
        with np.errstate(all="ignore"):
            rounded = Bits.from_float32(center.astype(np.float32), DType.FLOAT32)
        yield _Answer("lse", lse, center, radius, rounded)


def _hold(answer: _Answer, usable: Flags) -> _Held:
    center, radius = answer.center, answer.radius
    judged = np.broadcast_to(usable.reshape(usable.shape + (1,) * (center.ndim - 2)), center.shape)
    with np.errstate(all="ignore"):
        value = answer.actual.to_float64()
        error = np.abs(value - center)
        inside = (value == center) | (error <= radius)
        ratio = np.where(inside & (radius > 0), error / radius, 0.0)
    ulps, special = ulp.distances(answer.rounded, answer.actual)
    different = judged & (answer.rounded.data != answer.actual.data)
    worst = float(ratio[judged].max(initial=0.0))
    return _Held(answer, judged, judged & ~inside, different, ulps, special, worst)


def _differences(
    held: list[_Held], differing: list[Flags], among: list[Flags], shown: list[ulp.Histogram]
) -> Differences:
    """Count over all tensors; `among` are the elements whose ULPs count."""
    histogram: ulp.Histogram = ()
    for one in shown:
        histogram = ulp.merge(histogram, one)
    rows = [flags.reshape(len(flags), -1).any(axis=1) for flags in differing]
    return Differences(
        sum(int(np.count_nonzero(flags)) for flags in differing),
        int(np.count_nonzero(np.any(rows, axis=0))) if rows else 0,
        max((int(one.ulps[part].max(initial=0)) for one, part in zip(held, among, strict=True)), default=0),
        histogram,
    )


def _first(call: AttentionCall, held: list[_Held]) -> Place | None:
    """The first element outside: by row, then by tensor, then by head and element."""
    places = []
    for order, one in enumerate(held):
        if one.outside.any():
            where = tuple(int(i) for i in np.argwhere(one.outside)[0])
            places.append((where[0], order, where))
    if not places:
        return None
    row, order, where = min(places)
    answer = held[order].answer
    return place_at(answer.name, answer.rounded, answer.actual, call.rows, row, call.layer, where)
