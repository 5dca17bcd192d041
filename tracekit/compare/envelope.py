"""The error envelope: how far O and LSE of a sound kernel may lie from the exact answer.

The bound is derived in docs/verdicts.md, section "The envelope". In short, for one row and head:
each weight w_j = exp(x_j - m) is off by a factor within exp(E_j + nu), so with tau_j = expm1(E_j + nu)

    |O - O*|  <=  R + u_O (|O*| + R),    R = (sum p_j tau_j |v_j| + |O*| sum p_j tau_j) / (1 - sum p_j tau_j)
    |L - L*|  <=  -log1p(-sum p_j tau_j) + 8 u max(1, |L*|, |m|)

where `u` is binary32's unit roundoff, E_j the error of the score and nu that of P and of the sums. With
one tau for all keys R is at most 2 tau sum p|v| / (1 - tau): the form c u sum p|v| with c = 2.5.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tracekit.compare import ulp
from tracekit.compare.bits import Comparison, place_at
from tracekit.model import AttentionCall, Bits, Block, Conventions, DType, EmptyLse, LseBase, blocks
from tracekit.verdict import Compared, Differences, Place

Float64 = npt.NDArray[np.float64]

P_ROUNDING = 1.25
"""Factor on u_P: one rounding of P, (1 + u)/(1 - u) <= exp(1.25 * 2u) for u <= 2^-3."""

MOST = 0.5
"""A row whose weights may be off by more than half has no useful bound, and is not judged."""

_U32 = DType.FLOAT32.unit_roundoff
_SMALLEST = {DType.FLOAT16: 2.0**-24}


@dataclass(frozen=True)
class Roundings:
    """Where a kernel rounds.

    Args:
        score: dtype in which scaled scores are held.
        probability: dtype of P when it meets V.
    """

    score: DType = DType.FLOAT32
    probability: DType = DType.FLOAT32


@dataclass(frozen=True, eq=False)
class Envelope:
    """The exact answer to a call, and how far a sound kernel may be from it.

    Args:
        out: `[T, H, Dv]`, the exact O.
        out_radius: `[T, H, Dv]`.
        lse: `[T, H]`, the exact LSE, natural, sink not counted; -inf for a row without keys.
        lse_radius: `[T, H]`.
        usable: bool `[T, H]`, false where inputs are not finite or the bound says nothing.
        sink: `[H]`, or None.
        rounded: the exact O rounded to the dtype of the call: what ULPs are counted from.
    """

    out: Float64
    out_radius: Float64
    lse: Float64
    lse_radius: Float64
    usable: npt.NDArray[np.bool_]
    sink: Float64 | None
    rounded: Bits = field(repr=False)

    def declared_lse(self, conventions: Conventions) -> tuple[Float64, Float64]:
        """Return LSE and radius under declared conventions: base, sink counted or not, empty-row value."""
        lse, radius = self.lse, self.lse_radius
        if conventions.sink_in_lse and self.sink is not None:
            lse = np.logaddexp(lse, self.sink[None, :])
        empty = np.isneginf(self.lse)
        if conventions.lse_base is LseBase.TWO:
            lse, radius = lse / np.log(2.0), radius / np.log(2.0)
        if conventions.empty_lse is EmptyLse.POSITIVE_INFINITY:
            lse = np.where(empty, np.inf, lse)
        elif conventions.empty_lse is EmptyLse.SINK and self.sink is not None:
            lse = np.where(empty, self.sink[None, :], lse)
        return lse, radius


def envelope(call: AttentionCall, roundings: Roundings) -> Envelope:
    """Return the envelope of a call, computed in float64.

    Args:
        call: the call; its O and LSE are not looked at.
        roundings: where the kernel rounds.
    """
    shape = (call.num_rows, call.num_heads)
    sink = None if call.sink is None else call.sink.to_float64()
    out, out_radius = np.zeros((*shape, call.value_dim)), np.zeros((*shape, call.value_dim))
    lse, lse_radius = np.full(shape, -np.inf), np.zeros(shape)
    usable = np.ones(shape, np.bool_)
    with np.errstate(all="ignore"):
        for block in blocks(call):
            if not block.mask.size or not block.mask.any():
                continue
            parts = _block(block, call.conventions.scale, sink, roundings, call.dtype)
            for target, part in zip((out, out_radius, lse, lse_radius, usable), parts, strict=True):
                target[block.rows] = part
        usable &= np.isfinite(out).all(axis=2) & np.isfinite(out_radius).all(axis=2)
        rounded = Bits.from_float32(out.astype(np.float32), call.dtype)
    return Envelope(out, out_radius, lse, lse_radius, usable, sink, rounded)


def _block(
    block: Block, scale: float, sink: Float64 | None, roundings: Roundings, dtype: DType
) -> tuple[Float64, Float64, Float64, Float64, npt.NDArray[np.bool_]]:
    """O, its radius, LSE, its radius and usable of a block; heads are `[Hkv, G]` inside."""
    rows, heads, width = block.q.shape
    groups = block.keys.shape[1]
    mask = block.mask[None, None]
    q = block.q.reshape(rows, groups, -1, width).transpose(1, 2, 0, 3)  # [Hkv, G, R, D]
    keys = block.keys.transpose(1, 2, 0)[:, None]  # [Hkv, 1, D, N]
    values = block.values.transpose(1, 0, 2)[:, None]  # [Hkv, 1, N, Dv]
    sigma = np.full((groups, heads // groups, 1, 1), -np.inf)
    if sink is not None:
        sigma = sink.reshape(sigma.shape)

    x = np.where(mask, scale * (q @ keys), -np.inf)  # [Hkv, G, R, N]
    top = np.maximum(x.max(axis=-1, keepdims=True), sigma)
    dot = (width + 2) * scale * (np.abs(q) @ np.abs(keys))
    count = block.mask.sum(axis=1)[None, None, :, None]
    nu = P_ROUNDING * roundings.probability.unit_roundoff + (2 * count + 64) * _U32
    tau = np.where(mask, _relative(x, top, dot, nu, roundings.score), 0.0)
    tau_sink = np.where(np.isinf(sigma), 0.0, _relative(sigma, top, np.zeros(1), nu, roundings.score))

    peak = x.max(axis=-1, keepdims=True)
    weights = np.where(mask, np.exp(x - peak), 0.0)
    lse = peak + np.log(weights.sum(axis=-1, keepdims=True))
    p = np.where(mask, np.exp(x - lse), 0.0)  # without the sink
    share = 1.0 / (1.0 + np.exp(sigma - lse))  # what the sink leaves to the keys
    off = (p * tau).sum(axis=-1, keepdims=True)
    out = share * (p @ values)
    off_all = share * off + (1.0 - share) * tau_sink
    numerator = share * ((p * tau) @ np.abs(values)) + np.abs(out) * off_all
    spread = numerator / (1.0 - off_all)
    # Underflow: P below the smallest number of its dtype may become 0, and so may O.
    largest = np.abs(values).max(axis=2, keepdims=True)
    spread = spread + 2 * count * _smallest(roundings.probability) * largest
    radius = spread + dtype.unit_roundoff * (np.abs(out) + spread) + _smallest(dtype)
    lse_radius = -np.log1p(-off) + 8 * _U32 * np.maximum(1.0, np.maximum(np.abs(lse), np.abs(peak)))
    usable = (off < MOST) & (off_all < MOST)

    empty = count == 0
    out, radius = np.where(empty, 0.0, out), np.where(empty, 0.0, radius)
    lse, lse_radius = np.where(empty, -np.inf, lse), np.where(empty, 0.0, lse_radius)
    usable |= empty

    def back(part: Float64) -> Float64:
        return part.transpose(2, 0, 1, 3).reshape(rows, heads, -1)

    return (
        back(out),
        back(radius),
        back(lse)[..., 0],
        back(lse_radius)[..., 0],
        usable.transpose(2, 0, 1, 3).reshape(rows, heads),
    )


def _relative(x: Float64, top: Float64, dot: Float64, nu: Float64, score: DType) -> Float64:
    """tau: how much one weight may be off, relative to itself.

    binary32: D products and sums and the scale (`dot`), the maximum, the base of the exponential. Scores
    held in fewer bits: one rounding each of q.k, of the scale, and of x - m.
    """
    size, below = np.abs(x), np.abs(top - x)
    error = 1.01 * _U32 * (dot + 2 * size + 2 * below)
    if score is not DType.FLOAT32:
        error = error + 1.02 * score.unit_roundoff * (2 * size + below)
    tau: Float64 = np.expm1(np.minimum(error + nu, 50.0))
    return tau


def _smallest(dtype: DType) -> float:
    return _SMALLEST.get(dtype, 2.0**-120)


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
    answers: list[tuple[str, Bits, Float64, Float64, Bits]] = []
    if out is not None:
        answers.append(("out", out, bound.out, bound.out_radius, bound.rounded))
    if lse is not None:
        center, radius = bound.declared_lse(conventions)
        with np.errstate(all="ignore"):
            rounded = Bits.from_float32(center.astype(np.float32), DType.FLOAT32)
        answers.append(("lse", lse, center, radius, rounded))
    tensors, elements, bad, worst, most, bad_most = 0, 0, 0, 0.0, 0, 0
    shown: ulp.Histogram = ()
    bad_shown: ulp.Histogram = ()
    differs = 0
    rows_bad = np.zeros(call.num_rows, np.bool_)
    rows_differ = np.zeros(call.num_rows, np.bool_)
    first: tuple[tuple[int, ...], Place] | None = None
    for order, (name, actual, center, radius, expected) in enumerate(answers):
        judged = np.broadcast_to(
            bound.usable.reshape(bound.usable.shape + (1,) * (center.ndim - 2)), center.shape
        )
        with np.errstate(all="ignore"):
            value = actual.to_float64()
            error = np.abs(value - center)
            inside = (value == center) | (error <= radius)
            ratio = np.where(inside & (radius > 0), error / radius, 0.0)
        outside = judged & ~inside
        steps, special = ulp.distances(expected, actual)
        different = judged & (expected.data != actual.data)
        tensors += 1
        elements += int(np.count_nonzero(judged))
        differs += int(np.count_nonzero(different))
        bad += int(np.count_nonzero(outside))
        worst = max(worst, float(ratio[judged].max(initial=0.0)))
        most = max(most, int(steps[judged].max(initial=0)))
        bad_most = max(bad_most, int(steps[outside].max(initial=0)))
        if name == "out":
            shown = ulp.merge(shown, ulp.histogram(steps[judged], special[judged]))
        bad_shown = ulp.merge(bad_shown, ulp.histogram(steps[outside], special[outside]))
        rows_differ |= different.reshape(call.num_rows, -1).any(axis=1)
        rows_bad |= outside.reshape(call.num_rows, -1).any(axis=1)
        if outside.any():
            where = tuple(int(i) for i in np.unravel_index(int(np.argmax(outside)), outside.shape))
            key = (where[0], order, *where[1:])
            if first is None or key < first[0]:
                first = key, place_at(name, expected, actual, call.rows, where[0], call.layer, where)
    rows_judged = int(np.count_nonzero(bound.usable.any(axis=1)))
    compared = Compared(tensors, elements, rows_judged) if elements else Compared()
    return Bounded(
        Comparison(compared, Differences(differs, int(np.count_nonzero(rows_differ)), most, shown)),
        Comparison(
            compared,
            Differences(bad, int(np.count_nonzero(rows_bad)), bad_most, bad_shown),
            None if first is None else first[1],
        ),
        worst,
        int(np.count_nonzero(~bound.usable.all(axis=1))),
    )
