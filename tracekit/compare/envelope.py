"""The error envelope: how far O and LSE of a sound kernel may lie from the exact answer.

The bound is derived in docs/verdicts.md, section "The envelope". In short, for one row and head:
each weight w_j = exp(x_j - m) is off by a factor within exp(E_j + nu), so with tau_j = expm1(E_j + nu)

    |O - O*|  <=  R + u_O (|O*| + R),    R = (sum p_j tau_j |v_j| + |O*| sum p_j tau_j) / (1 - sum p_j tau_j)
    |L - L*|  <=  -log1p(-sum p_j tau_j - lost) + 8 u max(1, |L*|, |m|, |m'|)

where m is the largest score or sink, m' the largest score and `lost` what underflow may take. `u` is
binary32's unit roundoff, E_j the error of the score and nu that of P, of the sums and of the rescalings. With
one tau for all keys R is at most 2 tau sum p|v| / (1 - tau): the form c u sum p|v| with c = 2.5.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tracekit.model import AttentionCall, Bits, Block, Conventions, DType, EmptyLse, LseBase, blocks

Float64 = npt.NDArray[np.float64]

P_ROUNDING = 1.25
"""Factor on u_P: one rounding of P, (1 + u)/(1 - u) <= exp(1.25 * 2u) for u <= 2^-3."""

PER_KEY = 10
"""Units of binary32 a key: 1 of a sum, 1 of a rescaling by a new maximum and 8 of the exponential in it."""

FIXED = 64
"""Units a row: 40 of the exponential of a weight (20 ULP), and what does not grow with the keys."""

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
        lse_sink_radius: `[T, H]`, of the LSE that counts the sink; as `lse_radius` without one.
        usable: bool `[T, H]`, false where inputs are not finite or the bound says nothing.
        sink: `[H]`, or None.
        rounded: the exact O rounded to the dtype of the call: what ULPs are counted from.
    """

    out: Float64
    out_radius: Float64
    lse: Float64
    lse_radius: Float64
    lse_sink_radius: Float64
    usable: npt.NDArray[np.bool_]
    sink: Float64 | None
    rounded: Bits = field(repr=False)

    def declared_lse(self, conventions: Conventions) -> tuple[Float64, Float64]:
        """Return LSE and radius under declared conventions: base, sink counted or not, empty-row value."""
        lse, radius = self.lse, self.lse_radius
        if conventions.sink_in_lse and self.sink is not None:
            lse, radius = np.logaddexp(lse, self.sink[None, :]), self.lse_sink_radius
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
    lse, lse_radius, lse_sink_radius = np.full(shape, -np.inf), np.zeros(shape), np.zeros(shape)
    if sink is not None:
        lse_sink_radius[:] = _logarithm(sink)  # of a row without keys; overwritten for the others
    usable = np.ones(shape, np.bool_)
    with np.errstate(all="ignore"):
        for block in blocks(call):
            if not block.mask.size or not block.mask.any():
                continue
            parts = _block(block, call.conventions.scale, sink, roundings, call.dtype)
            targets = (out, out_radius, lse, lse_radius, lse_sink_radius, usable)
            for target, part in zip(targets, parts, strict=True):
                target[block.rows] = part
        usable &= np.isfinite(out).all(axis=2) & np.isfinite(out_radius).all(axis=2)
        rounded = Bits.from_float32(out.astype(np.float32), call.dtype)
    return Envelope(out, out_radius, lse, lse_radius, lse_sink_radius, usable, sink, rounded)


def _block(
    block: Block, scale: float, sink: Float64 | None, roundings: Roundings, dtype: DType
) -> tuple[Float64, Float64, Float64, Float64, Float64, npt.NDArray[np.bool_]]:
    """O, its radius, LSE, its two radii and usable of a block; heads are `[Hkv, G]` inside."""
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
    peak = x.max(axis=-1, keepdims=True)
    top = np.maximum(peak, sigma)
    dot = (width + 2) * scale * (np.abs(q) @ np.abs(keys))
    count = block.mask.sum(axis=1)[None, None, :, None]
    nu = P_ROUNDING * roundings.probability.unit_roundoff + (PER_KEY * count + FIXED) * _U32
    tau = np.where(mask, _relative(x, top, dot, nu, roundings.score), 0.0)
    tau_sink = np.where(np.isinf(sigma), 0.0, _relative(sigma, top, np.zeros(1), nu, roundings.score))

    lse = peak + np.log(np.where(mask, np.exp(x - peak), 0.0).sum(axis=-1, keepdims=True))
    total = np.logaddexp(lse, sigma)
    p = np.where(mask, np.exp(x - lse), 0.0)  # without the sink
    share = np.exp(lse - total)  # what the sink leaves to the keys
    off = (p * tau).sum(axis=-1, keepdims=True)
    off_all = share * off + (1.0 - share) * tau_sink
    out, spread = _out(p, tau, share, off_all, values)
    # Underflow: a weight below the smallest number of its dtype may become 0, and so may O.
    small = count * _smallest(roundings.probability)
    spread = spread + 2 * small * np.abs(values).max(axis=2, keepdims=True)
    radius = spread + dtype.unit_roundoff * (np.abs(out) + spread) + _smallest(dtype)
    off, off_all = off + small * np.exp(top - lse), off_all + small * np.exp(top - total)
    lse_radius = -np.log1p(-off) + _logarithm(lse, top, peak)
    sink_radius = -np.log1p(-off_all) + _logarithm(total, top, peak)
    usable = (off < MOST) & (off_all < MOST)

    empty = count == 0
    out, radius = np.where(empty, 0.0, out), np.where(empty, 0.0, radius)
    lse, lse_radius = np.where(empty, -np.inf, lse), np.where(empty, 0.0, lse_radius)
    sink_radius = np.where(empty, np.where(np.isinf(sigma), 0.0, _logarithm(sigma)), sink_radius)
    usable |= empty

    def back(part: Float64) -> Float64:
        return part.transpose(2, 0, 1, 3).reshape(rows, heads, -1)

    return (
        back(out),
        back(radius),
        back(lse)[..., 0],
        back(lse_radius)[..., 0],
        back(sink_radius)[..., 0],
        usable.transpose(2, 0, 1, 3).reshape(rows, heads),
    )


def _out(
    p: Float64, tau: Float64, share: Float64, off_all: Float64, values: Float64
) -> tuple[Float64, Float64]:
    """The exact O, and R: how far weights that are off by tau move it."""
    out: Float64 = share * (p @ values)
    numerator = share * ((p * tau) @ np.abs(values)) + np.abs(out) * off_all
    return out, numerator / (1.0 - off_all)


def _logarithm(*parts: Float64) -> Float64:
    """The error of a logarithm, of its base and of adding the maximum back, by the largest number met."""
    largest: Float64 = np.ones(1)
    for part in parts:
        largest = np.maximum(largest, np.abs(part))
    return 8 * _U32 * largest


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
