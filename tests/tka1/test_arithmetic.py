"""S1, S5, S11, S12, S13: the arithmetic, against exact numbers and between C++ and numpy."""

import ctypes
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tracekit.model.bits import Bits, DType
from tracekit.providers.tka1 import arithmetic as ar
from tracekit.providers.tka1.native import Library

Array = npt.NDArray[Any]


def call(build: Library, name: str, inputs: list[Array], outputs: list[type]) -> list[Array]:
    """Call an elementwise test entry of a library."""
    arrays = [np.ascontiguousarray(x) for x in inputs]
    results = [np.empty(arrays[0].shape, dtype) for dtype in outputs]
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (*arrays, *results)]
    getattr(build.handle, name)(*pointers, ctypes.c_int64(arrays[0].size))
    return results


def patterns(rng: np.random.Generator, count: int) -> Array:
    """Any bit pattern, so every exponent, NaN and infinity."""
    return rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)


def hard_triples(kind: str, rng: np.random.Generator, count: int) -> tuple[Array, Array, Array]:
    """Triples for which a fma out of other operations goes wrong first."""
    a, b = patterns(rng, count), patterns(rng, count)
    with np.errstate(all="ignore"):
        match kind:
            case "any bits":
                return a, b, patterns(rng, count)
            case "cancelling":  # c within an ulp or two of -a * b
                c = -(a * b)
                return a, b, (c.view(np.uint32) + rng.integers(0, 3, count, dtype=np.uint32)).view(np.float32)
            case "near a midpoint":  # a * b is half an ulp of c, exactly or nearly
                c = np.ldexp(1 + rng.integers(0, 2**23, count) / 2**23, rng.integers(-100, 100, count))
                c = c.astype(np.float32)
                a = np.ldexp(np.spacing(c), -1 - rng.integers(0, 2, count)).astype(np.float32)
                nudge = rng.choice([0, 1, -1, 2**-20, -(2**-10)], count) * 2.0**-23
                return a * rng.choice([1, -1], count).astype(np.float32), (1 + nudge).astype(np.float32), c
            case "far below c":  # more than 53 bits apart, on top of a c whose half ulp is taken
                a = np.ldexp(a.view(np.uint32) % 2**24 / 2**23, -60).astype(np.float32)
                c = patterns(rng, count)
                return a, np.ldexp(1.0, rng.integers(-20, 20, count)).astype(np.float32), c
            case _:  # subnormal results, also as a difference of normal products
                a = np.ldexp(rng.uniform(-2, 2, count), rng.integers(-80, -60, count)).astype(np.float32)
                b = np.ldexp(rng.uniform(-2, 2, count), rng.integers(-80, -60, count)).astype(np.float32)
                return a, b, (rng.integers(0, 2**24, count, dtype=np.uint32) | 1 << 31).view(np.float32)


KINDS = ("any bits", "cancelling", "near a midpoint", "far below c", "subnormal")


@pytest.mark.parametrize("kind", KINDS)
def test_the_numpy_fma_is_the_fma_of_the_processor(best: Library, kind: str):
    """S1. Five million triples a kind; `best` uses the instruction wherever there is one."""
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(20):
        a, b, c = hard_triples(kind, rng, 250_000)
        (want,) = call(best, "tka1_fma", [a, b, c], [np.float32])
        with np.errstate(all="ignore"):
            got = ar.fma(a, b, c)
        np.testing.assert_array_equal(ar.one_nan(got), ar.one_nan(want))


@pytest.mark.parametrize("kind", KINDS)
def test_the_fma_of_every_build_is_the_same(build: Library, best: Library, kind: str):
    """S1. The software fma of a build without the instruction against the instruction."""
    a, b, c = hard_triples(kind, np.random.default_rng(9), 1_000_000)
    (want,) = call(best, "tka1_fma", [a, b, c], [np.float32])
    (got,) = call(build, "tka1_fma", [a, b, c], [np.float32])
    np.testing.assert_array_equal(ar.one_nan(got), ar.one_nan(want))


def rounded(exact: Fraction) -> np.float32:
    """The binary32 number nearest to a rational; ties to the even one. Needs no fma and no binary64."""
    if exact == 0:
        return np.float32(0)
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    ulp = Fraction(2) ** (max(exponent, -126) - 23)
    return np.float32(float(round(size / ulp) * ulp) * (1 if exact > 0 else -1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_numpy_fma_is_the_rounded_rational(kind: str):
    """S1, without trust in any processor."""
    a, b, c = hard_triples(kind, np.random.default_rng(4), 1500)
    with np.errstate(all="ignore"):
        got = ar.fma(a, b, c)
        usable = np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & (np.abs(a.astype(float) * b + c) < 3e38)
    assert usable.sum() > 400
    for i in np.flatnonzero(usable):
        want = rounded(Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i])))
        assert got[i] == want, (a[i], b[i], c[i])


def exponents(low: int, high: int, count: int) -> Array:
    """Positive numbers, evenly over the fractions of each binade from 2^low to 2^high."""
    fractions = 1 + (np.arange(count) * 2**23 // count) / 2**23
    return np.concatenate([np.ldexp(fractions, e) for e in range(low, high)]).astype(np.float32)


def test_exp_is_right_to_an_ulp():
    """S5: e^x = p * 2^n, p near 1, for 2.4 million x of both signs up to 128.

    The polynomial errs by 2^-28; what is seen are the three roundings after it, which weigh most where p < 1.
    """
    size = exponents(-30, 7, 2**15)
    for x in (size, -size):
        p, n = ar.exp_parts(x)
        exact = np.exp(x.astype(np.longdouble)) * np.exp2(-n.astype(np.longdouble))
        error = np.abs(p.astype(np.longdouble) - exact)
        assert float((error / np.spacing(p)).max()) < 1.0
        assert float((error / exact).max()) < 1.4 * 2**-24
        assert p.min() >= np.float32(0.7071)
        assert p.max() <= np.float32(1.4143)


def test_n_never_falls_while_x_rises():
    """S5: so a key with a higher score never has a lower exponent; p stays a normal number near 1."""
    x = np.sort(
        np.concatenate([exponents(-10, 20, 2**14), -exponents(-10, 20, 2**14), [0.0]]).astype(np.float32)
    )
    p, n = ar.exp_parts(x)
    assert (np.diff(n) >= 0).all()
    assert p.min() > 0.68
    assert p.max() < 1.47


def test_a_logit_beyond_two_to_the_twenty_is_clamped():
    """S5."""
    p, n = ar.exp_parts(np.array([2.0**20, 3e38, -(2.0**20), -3e38], np.float32))
    assert (p[0], n[0], p[2], n[2]) == (p[1], n[1], p[3], n[3])


def test_log_is_right_to_an_ulp():
    """S12: ln(l * 2^m) for every exponent of a sum of weights; absolute where the result is near 0."""
    l = exponents(-1, 32, 2**13)  # noqa: E741 - the name in the specification
    for m in (0, 1, -1, 7, -40, 1000, -(2**20)):
        got = ar.log_parts(l, np.full(l.shape, m, np.int32))
        exact = np.log(l.astype(np.longdouble)) + m * np.log(np.longdouble(2))
        error = np.abs(got.astype(np.longdouble) - exact)
        near = np.abs(exact) < 2**-3
        assert float((error / np.spacing(np.abs(got)))[~near].max()) < 1.0
        assert not near.any() or float(error[near].max()) < 2**-26


def test_the_reciprocal_is_right_to_an_ulp():
    """S11."""
    l = exponents(-1, 32, 2**13)  # noqa: E741
    got = ar.reciprocal(l).astype(np.longdouble)
    assert float(np.max(np.abs(got * l - 1))) < 2**-23


def test_bf16_rounds_to_nearest_even():
    """S11, S13: against the reading of `Bits`, over every kind of pattern and every tie."""
    rng = np.random.default_rng(2)
    ties = (rng.integers(0, 2**16, 2**14, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    x = np.concatenate(
        [patterns(rng, 2**18), ties, np.array([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38], np.float32)]
    )
    np.testing.assert_array_equal(ar.to_bf16(x), Bits.from_float32(x, DType.BFLOAT16).data)


def test_every_binary16_number_is_widened_exactly(build: Library):
    bits = np.arange(2**16).astype(np.uint16)
    (got,) = call(build, "tka1_from_f16", [bits], [np.float32])
    same = got == bits.view(np.float16).astype(np.float32)
    assert (same | (np.isnan(got) & np.isnan(bits.view(np.float16)))).all()


def test_binary16_is_rounded_to_nearest_even(build: Library):
    """Every binary16 number, the midpoints between them, the numbers beside those, and any bits."""
    rng = np.random.default_rng(5)
    exact = np.arange(0x7C00).astype(np.uint16).view(np.float16).astype(np.float32)
    middle = (exact[1:] + exact[:-1]) / np.float32(2)  # exact in binary32
    beside = [np.nextafter(middle, np.float32(way)) for way in (-np.inf, np.inf)]
    last = np.array([65519.996, 65520, 2.0**-25, 2.0**-149, 0], np.float32)
    x = np.concatenate([exact, middle, *beside, last, patterns(rng, 10**5)])
    x = np.concatenate([x, -x])
    (got,) = call(build, "tka1_f16", [x], [np.uint16])
    np.testing.assert_array_equal(got, ar.narrow(x, DType.FLOAT16))


def test_every_build_agrees_with_numpy_on_the_functions(build: Library):
    """S5, S11, S12."""
    rng = np.random.default_rng(3)
    x = patterns(rng, 2**20)
    x = np.where(np.isfinite(x), x, np.float32(1))
    l, m = exponents(-1, 32, 2**13), rng.integers(-(2**20), 2**20, 33 * 2**13).astype(np.int32)  # noqa: E741
    pairs = [
        (call(build, "tka1_exp", [x], [np.float32, np.int32]), ar.exp_parts(x)),
        (call(build, "tka1_log", [l, m], [np.float32]), [ar.log_parts(l, m)]),
        (call(build, "tka1_rcp", [l], [np.float32]), [ar.reciprocal(l)]),
        (call(build, "tka1_bf16", [x], [np.uint16]), [ar.to_bf16(x)]),
    ]
    for got, want in pairs:
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))
