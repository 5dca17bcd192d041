"""`Bits`: a tensor as the exact bit patterns that were stored, with a logical dtype.

numpy has no bfloat16 or FP8, and a float comparison equates +0 with -0 and loses NaN payloads; so
nothing in tracekit is compared or stored as floats.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall

Array = npt.NDArray[Any]


class DType(StrEnum):
    """Logical dtypes; the value is what a trace stores as `tracekit_dtype`."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2 = "float8_e5m2"

    __hash__ = str.__hash__
    """That of an enumeration is written in Python, and each look into a table by dtype asks for it."""

    @property
    def container(self) -> np.dtype[Any]:
        """The unsigned integer dtype that holds the bits."""
        return np.dtype(_CONTAINERS[self])

    @property
    def unit_roundoff(self) -> float:
        """u = 2^-p for p significand bits: the largest relative error of one rounding to nearest."""
        return float(2.0 ** -_PRECISIONS[self])


_CONTAINERS = {
    DType.BFLOAT16: np.uint16,
    DType.FLOAT16: np.uint16,
    DType.FLOAT32: np.uint32,
    DType.FLOAT8_E4M3FN: np.uint8,
    DType.FLOAT8_E4M3FNUZ: np.uint8,
    DType.FLOAT8_E5M2: np.uint8,
}
_PRECISIONS = {
    DType.BFLOAT16: 8,
    DType.FLOAT16: 11,
    DType.FLOAT32: 24,
    DType.FLOAT8_E4M3FN: 4,
    DType.FLOAT8_E4M3FNUZ: 4,
    DType.FLOAT8_E5M2: 3,
}


@dataclass(frozen=True, eq=False)
class Bits:
    """Bit patterns of a tensor.

    `data` is taken over, not copied: who makes `Bits` out of an array writes to it no more. A copy would
    cost a fifth of the time to read a large trace and its memory once more, and everything inside tracekit
    hands over arrays of its own. Arrays of others are copied where they come in: `recorder.tensors.as_bits`.

    Args:
        data: unsigned integers, any shape; seen read-only and C-contiguous.
        dtype: how to read one pattern.

    Raises:
        InvalidCall: `M-BITS-CONTAINER` when `data` is not the dtype's unsigned integer.
    """

    data: Array
    dtype: DType

    def __post_init__(self) -> None:
        if self.data.dtype != self.dtype.container:
            raise InvalidCall(
                f"{self.dtype} is held in {self.dtype.container}, not in {self.data.dtype}; "
                "pass the bit patterns, not floats.",
                rule="M-BITS-CONTAINER",
                dtype=self.dtype.value,
                container=str(self.data.dtype),
            )
        data = np.ascontiguousarray(self.data)
        if data.flags.writeable:
            data = data.view()
            data.flags.writeable = False
        object.__setattr__(self, "data", data)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.data.shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.data.size

    def __repr__(self) -> str:
        return f"Bits({self.dtype.value}, {list(self.shape)})"

    def same(self, other: Self) -> bool:
        """Say whether dtype, shape and every bit are equal: +0 is not -0, a NaN equals only its own bits."""
        return (
            self.dtype == other.dtype
            and self.shape == other.shape
            and bool(np.array_equal(self.data, other.data))
        )

    def take(self, order: Array) -> "Bits":
        """Return the rows (axis 0) in another order."""
        return Bits(self.data[order], self.dtype)

    def part(self, index: Any) -> "Bits":
        """Return `self[index]` for any basic numpy index."""
        return Bits(self.data[index], self.dtype)

    def to_float32(self) -> npt.NDArray[np.float32]:
        """Decode to binary32; exact for every dtype."""
        match self.dtype:
            case DType.FLOAT32:
                return self.data.view(np.float32)
            case DType.FLOAT16:
                return self.data.view(np.float16).astype(np.float32)
            case DType.BFLOAT16:
                return (self.data.astype(np.uint32) << 16).view(np.float32)
            case _:
                return _float8_table(self.dtype)[self.data]

    def to_float64(self) -> npt.NDArray[np.float64]:
        """Decode to binary64; exact for every dtype."""
        return self.to_float32().astype(np.float64)

    @classmethod
    def from_float32(cls, values: npt.ArrayLike, dtype: DType) -> "Bits":
        """Round binary32 values to nearest even; NaN becomes the quiet NaN of the dtype.

        Raises:
            InvalidCall: `M-BITS-ENCODE` for FP8, whose rounding belongs to an engine.
        """
        x = np.ascontiguousarray(values, np.float32)
        match dtype:
            case DType.FLOAT32:
                return cls(x.view(np.uint32), dtype)
            case DType.FLOAT16:
                with np.errstate(over="ignore"):
                    return cls(x.astype(np.float16).view(np.uint16), dtype)
            case DType.BFLOAT16:
                u = x.view(np.uint32)
                rounded = ((u.astype(np.uint64) + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
                return cls(np.where(np.isnan(x), np.uint16(0x7FC0), rounded), dtype)
            case _:
                raise InvalidCall(
                    f"tracekit does not round to {dtype.value}; pass the bits that the engine stored.",
                    rule="M-BITS-ENCODE",
                    dtype=dtype.value,
                )


def _float8_table(dtype: DType) -> npt.NDArray[np.float32]:
    """The 256 values of an FP8 format (OCP 8-bit floating point specification 1.0; fnuz: bias one higher)."""
    code = np.arange(256)
    mantissa_bits, bias = (2, 15) if dtype is DType.FLOAT8_E5M2 else (3, 7)
    if dtype is DType.FLOAT8_E4M3FNUZ:
        bias = 8
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    value = np.where(code & 0x80, -value, value)
    if dtype is DType.FLOAT8_E4M3FN:
        value[[0x7F, 0xFF]] = np.nan
    elif dtype is DType.FLOAT8_E4M3FNUZ:
        value[0x80] = np.nan
    else:
        value[exponent == 31] = np.where(mantissa, np.nan, np.where(code & 0x80, -np.inf, np.inf))[
            exponent == 31
        ]
    return value.astype(np.float32)
