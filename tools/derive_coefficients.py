"""Derive the constants of `kernels/tk_math.h`.

    python tools/derive_coefficients.py > kernels/coefficients.txt

Method, for each polynomial: minimax in 40 digits by the exchange algorithm of Remez on a grid of Chebyshev
nodes, for the largest *relative* error of the whole function, then every coefficient is rounded to binary32.
(Rounding costs 0.3 bit of exp and nothing of log1p: a coefficient of x^2 or higher is multiplied by powers of
|x| < 0.42. The tests measure the errors that remain.)

    exp(r)   = 1 + r + r^2 (c2 + c3 r + ... + c6 r^4)      |r| <= 0.34658, just over ln(2) / 2
    log1p(f) = f - f^2/2 + f^3 (l3 + l4 f + ... + l10 f^7)  sqrt(1/2) - 1 <= f <= sqrt(2) - 1

The output is the one that the header must agree with (tests/tka1/test_coefficients.py runs this file again).
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mpmath as mp

NODES = 300
Number: TypeAlias = Any  # an mpmath number; the package has no type information
Function = Callable[[Number], Number]


def round32(x: Number) -> Number:
    """Round to the nearest binary32; ties do not occur for the numbers here."""
    mantissa, exponent = mp.frexp(x)
    return mp.ldexp(mp.nint(mp.ldexp(mantissa, 24)), exponent - 24)


def bits32(x: Number) -> int:
    """Return the bit pattern of a number that binary32 holds exactly."""
    value = float(x)
    assert mp.mpf(value) == x
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def grid(low: Number, high: Number) -> list[Number]:
    """Chebyshev nodes of an interval, ascending; none of them is 0."""
    middle, half = (low + high) / 2, (high - low) / 2
    points = [middle - half * mp.cos(mp.pi * (2 * i + 1) / (2 * NODES)) for i in range(NODES)]
    return [x for x in points if abs(x) > mp.mpf(10) ** -6]


def minimax(
    points: Sequence[Number], target: Sequence[Number], weight: Sequence[Number], powers: range
) -> list[Number]:
    """Return a with the smallest max |(sum a_k x^k - target) * weight| over the points (Remez).

    Args:
        points: grid, ascending.
        target: values to approximate.
        weight: factors of the error; its sign must make `weight * x^powers[0]` keep one sign.
        powers: the powers k of the free coefficients.
    """
    unknowns = len(powers)
    step = (len(points) - 1) / unknowns
    chosen = [round(i * step) for i in range(unknowns + 1)]
    for _ in range(50):
        rows = [[points[i] ** k for k in powers] + [(-1) ** n / weight[i]] for n, i in enumerate(chosen)]
        solution = mp.lu_solve(mp.matrix(rows), mp.matrix([target[i] for i in chosen]))
        coefficients, level = list(solution[:unknowns]), abs(solution[unknowns])
        error = [
            (mp.polyval(coefficients[::-1], x) * x ** powers[0] - y) * w
            for x, y, w in zip(points, target, weight, strict=True)
        ]
        chosen = _exchange(error, unknowns + 1)
        if max(abs(e) for e in error) <= level * (1 + mp.mpf(10) ** -9):
            return coefficients
    raise AssertionError("Remez did not settle")


def _exchange(error: Sequence[Number], count: int) -> list[int]:
    """The largest point of each run of equal signs; the smaller end goes while there are too many."""
    peaks: list[int] = []
    for i, e in enumerate(error):
        if peaks and (error[peaks[-1]] > 0) == (e > 0):
            if abs(e) > abs(error[peaks[-1]]):
                peaks[-1] = i
        else:
            peaks.append(i)
    while len(peaks) > count:
        peaks.pop(0 if abs(error[peaks[0]]) < abs(error[peaks[-1]]) else -1)
    assert len(peaks) == count, "the error has too few sign changes"
    return peaks


def fit(function: Function, known: Function, powers: range, low: Number, high: Number) -> list[Number]:
    """Fit `function - known` by powers, with binary32 coefficients, for the relative error of `function`."""
    points = grid(low, high)
    target = [function(x) - known(x) for x in points]
    # Signed: x^3 and log1p(x) change sign together at 0, so the weighted basis does not, as Remez needs.
    weight = [1 / function(x) for x in points]
    return [round32(c) for c in minimax(points, target, weight, powers)]


def derive() -> list[tuple[str, int]]:
    """Return (name, binary32 bits) of every derived constant, in the order of the header."""
    with mp.workdps(40):
        half = mp.mpf("0.34658")
        exp = fit(mp.exp, lambda r: 1 + r, range(2, 7), -half, half)
        low, high = mp.sqrt(mp.mpf(1) / 2) - 1, mp.sqrt(2) - 1
        log = fit(mp.log1p, lambda f: f - f * f / 2, range(3, 11), low, high)
        ln2_high = round32(mp.ln(2))
        constants = [
            ("TK_LOG2E", round32(1 / mp.ln(2))),
            ("TK_LN2_HI", ln2_high),
            ("TK_LN2_LO", round32(mp.ln(2) - ln2_high)),
            ("TK_SQRT_HALF", round32(mp.sqrt(mp.mpf(1) / 2))),
            *((f"TK_EXP_C{k}", c) for k, c in enumerate(exp, 2)),
            *((f"TK_LOG_C{k}", c) for k, c in enumerate(log, 3)),
        ]
        return [(name, bits32(value)) for name, value in constants]


def table(constants: Sequence[tuple[str, int]]) -> str:
    """Return one line a constant: name, bits, value as a hexadecimal float."""
    value = {bits: struct.unpack("<f", struct.pack("<I", bits))[0] for _, bits in constants}
    return "".join(f"{name:13} 0x{bits:08X} {value[bits].hex()}\n" for name, bits in constants)


if __name__ == "__main__":
    print(table(derive()), end="")
