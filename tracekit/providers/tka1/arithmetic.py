"""The arithmetic of TKA-1 in numpy, written from docs/tka1.md, not from the C++ (S1, S5 to S7, S11 to S13).

numpy has no fma. A binary32 fma is made of binary64 operations instead; see `fma`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.errors import Unsupported
from tracekit.model.bits import DType

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]

EMPTY = -(2**30)
"""M of a partial without a finite key (S6)."""

NAN = 0x7FC00000
INF = 0x7F800000
NEG_INF = 0xFF800000

# tools/derive_coefficients.py prints these bits; tests/tka1/test_coefficients.py compares.
LOG2E, LN2_HI, LN2_LO, SQRT_HALF = 0x3FB8AA3B, 0x3F317218, 0xB102E308, 0x3F3504F3
EXP = (0x3AB51227, 0x3C091CEB, 0x3D2AAC79, 0x3E2AAA49, 0x3EFFFFFE)
LOG = (0xBD9C5AFE, 0x3E02AD94, 0xBE06C27D, 0x3E116D0F, 0xBE2A3927, 0x3E4CD004, 0xBE800113, 0x3EAAAAAA)
ROUNDER, RCP_SEED = 0x4B400000, 0x7EF311C7
LIMIT = np.float32(2**20)


def constant(bits: int) -> np.float32:
    """Return the binary32 number with these bits."""
    return np.uint32(bits).view(np.float32)


def require_subnormals() -> None:
    """Refuse to run where the caller has set flush-to-zero: numpy computes in the caller's mode (S1).

    Raises:
        Unsupported: `S1-FLUSH`.
    """
    smallest = np.full(1, 2.0**-126, np.float32)
    if not (smallest * np.float32(0.5) != 0).all():
        raise Unsupported(
            "this thread flushes subnormal numbers to zero, and the numpy form computes in the mode of its "
            "caller; reset the mode (torch.set_flush_denormal(False)) or use the native form. "
            "Rule: docs/tka1.md, S1.",
            rule="S1-FLUSH",
        )


def widen(bits: npt.NDArray[Any], dtype: DType = DType.BFLOAT16) -> F32:
    """Return the numbers of a launch's dtype as binary32; exact (S2)."""
    if dtype is DType.FLOAT32:
        return np.ascontiguousarray(bits, np.uint32).view(np.float32)
    if dtype is DType.FLOAT16:
        return np.ascontiguousarray(bits, np.uint16).view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def add_once(exact: F64, c: F32) -> F32:
    """Return `exact + c`, rounded once to binary32.

    The sum is rounded to binary64 and from there to binary32. Two roundings differ from one only where the
    first lands on the midpoint of two binary32 numbers: a significand that ends in 1 and 28 zeros, or, below
    2^-126 where binary32 has fewer digits, anywhere. Those few are rounded to odd instead, which loses no
    information: truncate, and set the last bit when something was cut off.

    Args:
        exact: products of two binary32 numbers, exact in binary64.
        c: broadcast to the shape of the sum.
    """
    total = exact + c
    suspect = (total.view(np.uint64) & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    suspect |= (np.abs(total) < 2.0**-126) & (total != 0)
    if suspect.any():
        at = np.nonzero(suspect)
        x, y, s = np.broadcast_to(exact, total.shape)[at], np.broadcast_to(c, total.shape)[at], total[at]
        back = s - x
        error = (x - (s - back)) + (y.astype(np.float64) - back)
        inward = (np.signbit(error) != np.signbit(s)).astype(np.uint64)
        odd = ((s.view(np.uint64) - inward) | np.uint64(1)).view(np.float64)
        total[at] = np.where((error > 0) | (error < 0), odd, s)
    return total.astype(np.float32)


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F32:
    """Return a * b + c with one rounding, for binary32 arrays that broadcast."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    return add_once(np.atleast_1d(product), np.asarray(c, np.float32))


def exp_parts(x: F32) -> tuple[F32, I32]:
    """Return (p, n) with e^x = p * 2^n for finite x, clamped to 2^20 (S5)."""
    x = np.clip(x, -LIMIT, LIMIT)
    shifted = fma(x, constant(LOG2E), constant(ROUNDER))
    n = (shifted.view(np.uint32) - np.uint32(ROUNDER)).view(np.int32)
    whole = shifted - constant(ROUNDER)
    r = fma(whole, -constant(LN2_HI), x)
    r = fma(whole, -constant(LN2_LO), r)
    q = _horner(EXP, r)
    return fma(q, r * r, r) + np.float32(1), n


def log_parts(l: F32, m: I32) -> F32:  # noqa: E741 - the name in the specification
    """Return ln(l * 2^m) for positive normal l (S12)."""
    bits = l.view(np.uint32)
    e = (bits - np.uint32(SQRT_HALF)).view(np.int32) >> 23
    f = (bits - (e.view(np.uint32) << np.uint32(23))).view(np.float32) - np.float32(1)
    q = _horner(LOG, f)
    ff = f * f
    whole = (m + e).astype(np.float32)
    r = fma(ff, np.float32(-0.5), (ff * f) * q)
    r = fma(whole, constant(LN2_LO), r) + f
    return fma(whole, constant(LN2_HI), r)


def _horner(coefficients: tuple[int, ...], x: F32) -> F32:
    q = np.full(x.shape, constant(coefficients[0]), np.float32)
    for c in coefficients[1:]:
        q = fma(q, x, constant(c))
    return q


def reciprocal(l: F32) -> F32:  # noqa: E741 - the name in the specification
    """Return 1 / l for positive normal l: a seed from the bits and four Newton steps (S11)."""
    y = (np.uint32(RCP_SEED) - l.view(np.uint32)).view(np.float32)
    for _ in range(4):
        y = fma(y, fma(-l, y, np.float32(1)), y)
    return y


def pow2(d: I32) -> F32:
    """Return 2^d for d <= 0, +0 below the normal range (S7)."""
    return np.where(d < -126, 0, (np.maximum(d, -126) + 127) << 23).astype(np.uint32).view(np.float32)


def scale_p(p: F32, d: I32) -> F32:
    """Return p * 2^d for d <= 0 by adding to the exponent, +0 where d < -125 (S6)."""
    shifted = p.view(np.uint32) + (np.maximum(d, -125).astype(np.uint32) << np.uint32(23))
    return np.where(d < -125, np.float32(0), shifted.view(np.float32))


def to_bf16(x: F32) -> U16:
    """Round to bf16, nearest even, one NaN (S11, S13)."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(NAN >> 16), rounded)


def narrow(x: F32, dtype: DType) -> npt.NDArray[Any]:
    """Round to a launch's dtype, nearest even, one NaN (S11, S13)."""
    if dtype is DType.FLOAT32:
        return one_nan(x)
    if dtype is DType.FLOAT16:
        with np.errstate(over="ignore"):
            return np.where(np.isnan(x), np.uint16(0x7E00), x.astype(np.float16).view(np.uint16))
    return to_bf16(x)


def one_nan(x: F32) -> U32:
    """Return the bits of x with the one NaN that is ever stored (S13)."""
    return np.where(np.isnan(x), np.uint32(NAN), np.ascontiguousarray(x).view(np.uint32))
