"""How far two bit patterns of one dtype are apart, in units in the last place."""

import numpy as np
import numpy.typing as npt

from tracekit.model import Array, Bits, DType

Histogram = tuple[tuple[str, int], ...]

SAME = "0"
SPECIAL = ("sign of zero", "inf", "nan")


def ordered(bits: Bits) -> npt.NDArray[np.int64]:
    """Map patterns to integers in the order of their values, neighbours 1 apart; both zeros are 0."""
    patterns = bits.data.astype(np.int64)
    sign = np.int64(1) << (8 * bits.dtype.container.itemsize - 1)
    magnitude = patterns & (sign - 1)
    return np.where(patterns & sign, -magnitude, magnitude)


def distances(expected: Bits, actual: Bits) -> tuple[npt.NDArray[np.int64], Array]:
    """Return the ULP distance of each pair, int64, and its special class, int8.

    The class is 0 for two finite numbers, 1 for zeros of opposite sign, 2 where one side is infinite,
    3 where one side is NaN (whatever its payload). Distances of classes 2 and 3 are 0: they have no meaning.
    """
    steps = np.abs(ordered(expected) - ordered(actual))
    left, right = expected.to_float32(), actual.to_float32()
    different = expected.data != actual.data
    special = np.zeros(expected.shape, np.int8)
    special[different & (steps == 0)] = 1
    special[different & (np.isinf(left) | np.isinf(right))] = 2
    special[different & (np.isnan(left) | np.isnan(right))] = 3
    # FNUZ has no -0: its pattern 0x80 is the only NaN.
    steps[special >= 2] = 0
    return steps, special


def histogram(steps: Array, special: Array) -> Histogram:
    """Count pairs by class: `0`, `1`, `2-3`, `4-7`, ..., then the special ones; empty ones are left out."""
    finite = steps[special == 0]
    counts = [(SAME, int(np.count_nonzero(finite == 0)))]
    power = np.floor(np.log2(np.maximum(finite, 1))).astype(np.int64)
    for exponent in np.unique(power[finite > 0]).tolist():
        counts.append((_label(exponent), int(np.count_nonzero((power == exponent) & (finite > 0)))))
    counts += [(name, int(np.count_nonzero(special == code))) for code, name in enumerate(SPECIAL, 1)]
    return tuple((name, count) for name, count in counts if count)


def merge(left: Histogram, right: Histogram) -> Histogram:
    """Add two histograms."""
    total = dict(left)
    for name, count in right:
        total[name] = total.get(name, 0) + count
    return tuple(sorted(total.items(), key=lambda pair: _rank(pair[0])))


def pattern(bits: int, dtype: DType) -> str:
    """Return one pattern as `0x3f80`."""
    return f"{bits:#0{2 + 2 * dtype.container.itemsize}x}"


def _label(exponent: int) -> str:
    low, high = 1 << exponent, (1 << (exponent + 1)) - 1
    return str(low) if low == high else f"{low}-{high}"


def _rank(name: str) -> int:
    return (1 << 62) + SPECIAL.index(name) if name in SPECIAL else int(name.partition("-")[0])
