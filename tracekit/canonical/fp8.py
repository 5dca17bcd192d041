"""FP8 KV: what is stored, and the values that it stands for; two tiers that are never exchanged.

**Storage** is the FP8 codes, their format, and the scales they were written with. **Value** is code × scale.
Different codes and scales can give equal values, so equal values do not prove equal storage.

Scales that are powers of two (UE8M0: code s is 2^(s - 127), 255 is NaN; OCP Microscaling 1.0): an e4m3 number
is k · 2^j with a whole k below 16, so has at most 4 significant bits, of which BF16 holds 8. Times a power of
two it keeps them, and is a BF16 number unless it leaves the range:

* its last bit is at least 2^-9 · 2^(s - 127), and the last bit of the smallest BF16 number is 2^-133: nothing
  is lost below for s >= 3 (the product is a normal BF16 number for s >= 10);
* it is at most 448 · 2^(s - 127) = 1.75 · 2^(s - 119), and BF16 ends below 2^128: no overflow for s <= 246.

So every OCP code is exact for 3 <= s <= 246. The fnuz numbers are half as large (at most 240, last bit at
least 2^-10): exact for 4 <= s <= 247. Outside, the products are looked at and an inexact one is refused.

Scales that are binary32 have 24 significant bits, the product up to 28: the value is the product rounded once
to nearest binary32, and says so with its `ValueRule`. What a kernel does with such codes (scale folded into
the softmax, product in BF16) differs; there the storage is what is canonical.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tracekit.canonical.refuse import refuse
from tracekit.model import Array, Bits, DType


class ScaleFormat(StrEnum):
    """How a scale is stored: a power of two in one byte, or the bits of a binary32."""

    UE8M0 = "ue8m0"
    FLOAT32 = "float32"


class ValueRule(StrEnum):
    """What a value is, seen from code × scale: that number, or the nearest binary32 to it."""

    EXACT = "exact"
    NEAREST_FLOAT32 = "nearest float32"


@dataclass(frozen=True, eq=False)
class Stored:
    """The storage tier of some FP8 rows.

    Args:
        codes: FP8 `[..., n]`.
        scales: uint8 for UE8M0, uint32 bits for binary32; broadcasts to `[..., n / group]`.
        scale_format: how a scale is read.
        group: elements of the last axis that share a scale; None for all n.
        generation: write epoch of the codes.
        scale_generation: write epoch of the scales.

    Raises:
        InvalidCall: `C-FP8-SHAPE`; `C-FP8-SCALE` a scale that is NaN, infinite, zero or negative;
            `C-FP8-STALE` scales of another epoch than their codes.
    """

    codes: Bits
    scales: Array
    scale_format: ScaleFormat
    group: int | None = None
    generation: int = 0
    scale_generation: int = 0

    def __post_init__(self) -> None:
        if self.codes.dtype.container != np.uint8 or not self.codes.shape:
            refuse("C-FP8-SHAPE", f"codes are FP8 `[..., n]`, not {self.codes}.")
        wanted = np.uint8 if self.scale_format is ScaleFormat.UE8M0 else np.uint32
        if self.scales.dtype != wanted:
            refuse(
                "C-FP8-SHAPE", f"{self.scale_format} scales are {wanted.__name__}, not {self.scales.dtype}."
            )
        grouped = self._grouped
        try:
            fits = np.broadcast_shapes(self.scales.shape, grouped) == grouped
        except ValueError:
            fits = False
        if not fits:
            refuse(
                "C-FP8-SHAPE",
                f"scales {list(self.scales.shape)} do not fit codes {list(self.codes.shape)} in groups of "
                f"{self.group}.",
            )
        scales = self._scale_values()
        bad = ~(np.isfinite(scales) & (scales > 0))
        if bad.any():
            refuse(
                "C-FP8-SCALE",
                f"a scale is {float(scales[bad][0])}; codes mean nothing without the scale of their writing.",
                scale=str(float(scales[bad][0])),
            )
        if self.generation != self.scale_generation:
            refuse(
                "C-FP8-STALE",
                f"codes of generation {self.generation} with scales of generation {self.scale_generation}.",
                generation=self.generation,
                scale_generation=self.scale_generation,
            )

    @property
    def _grouped(self) -> tuple[int, ...]:
        *outer, n = self.codes.shape
        if self.group is None:
            return (*outer, 1)
        if self.group < 1 or n % self.group:
            refuse("C-FP8-SHAPE", f"{n} codes do not divide into groups of {self.group}.")
        return (*outer, n // self.group)

    def _scale_values(self) -> Array:
        """float64, exact."""
        if self.scale_format is ScaleFormat.FLOAT32:
            return np.ascontiguousarray(self.scales).view(np.float32).astype(np.float64)
        exponent = self.scales.astype(np.int64) - 127
        return np.where(self.scales == 255, np.nan, np.ldexp(1.0, exponent))

    def scale_of_each(self) -> Array:
        """Return the scale of every code, float64 `[..., n]`, exact."""
        grouped = np.broadcast_to(self._scale_values(), self._grouped)
        return np.repeat(grouped, self.codes.shape[-1] if self.group is None else self.group, axis=-1)


@dataclass(frozen=True, eq=False)
class Values:
    """The value tier: BF16 where it is exact, else binary32, and which of the two."""

    bits: Bits
    rule: ValueRule


def decode(stored: Stored) -> Values:
    """Return the values that stored rows stand for, `[..., n]`.

    A NaN code becomes the quiet NaN of the value's dtype: FP8 NaNs have no payload to keep.

    Raises:
        InvalidCall: `C-FP8-RANGE` when a power-of-two product is no BF16 number.
    """
    # Exact: 4 significant bits times 24, and exponents far inside those of binary64.
    product = stored.codes.to_float64() * stored.scale_of_each()
    with np.errstate(over="ignore", under="ignore"):
        single = product.astype(np.float32)
    if stored.scale_format is ScaleFormat.FLOAT32:
        return Values(Bits.from_float32(single, DType.FLOAT32), ValueRule.NEAREST_FLOAT32)
    with np.errstate(over="ignore"):
        bits = Bits.from_float32(single, DType.BFLOAT16)
    _need_equal(product, bits, "C-FP8-RANGE")
    return Values(bits, ValueRule.EXACT)


def narrow(values: Values, dtype: DType) -> Values:
    """Return the same values in a narrower dtype; the rule stays.

    Raises:
        InvalidCall: `C-FP8-INEXACT` when a value is no number of that dtype: tracekit does not round it.
    """
    single = values.bits.to_float32()
    bits = Bits.from_float32(single, dtype)
    _need_equal(single.astype(np.float64), bits, "C-FP8-INEXACT")
    return Values(bits, values.rule)


def encode(values: Bits, scales: Array, dtype: DType, group: int | None = None) -> Stored:
    """Return the storage that stands for values under given UE8M0 scales; the inverse of `decode`.

    Only a code whose product is the value itself is taken: quantising is the engine's, and choosing scales
    would exchange one tier for the other.

    Args:
        values: `[..., n]`.
        scales: uint8, as in `Stored`.
        dtype: an e4m3 format.
        group: as in `Stored`.

    Raises:
        InvalidCall: as `Stored`; `C-FP8-ENCODE` when a value has no code under its scale, NaN included.
    """
    blank = Bits(np.zeros(values.shape, np.uint8), dtype)
    empty = Stored(blank, scales, ScaleFormat.UE8M0, group)
    quotient = values.to_float64() / empty.scale_of_each()
    table = Bits(np.arange(256, dtype=np.uint8), dtype).to_float64()
    # Looked up by the bits of the binary64, so that +0 and -0 keep apart.
    keys = table.view(np.uint64)
    order = np.argsort(keys)
    at = order[np.minimum(np.searchsorted(keys, quotient.view(np.uint64), sorter=order), 255)]
    missing = (keys[at] != quotient.view(np.uint64)) | np.isnan(quotient)
    if missing.any():
        where = tuple(int(i) for i in np.argwhere(missing)[0])
        refuse(
            "C-FP8-ENCODE",
            f"element {list(where)} has no {dtype} code under its scale.",
            element=list(where),
            value=str(float(values.to_float64()[where])),
        )
    return Stored(Bits(at.astype(np.uint8), dtype), scales, ScaleFormat.UE8M0, group)


def _need_equal(exact: Array, bits: Bits, rule: str) -> None:
    bad = (bits.to_float64() != exact) & ~np.isnan(exact)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        refuse(
            rule,
            f"element {list(where)} is {float(exact[where])!r}, which is no {bits.dtype} number.",
            element=list(where),
            count=int(bad.sum()),
        )
