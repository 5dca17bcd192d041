"""Rows of KV as they lie in an engine's memory, told by addresses: a decode step compares thousands.

Making an array of each part of each layer takes longer than comparing its rows.
"""

import ctypes
from typing import NamedTuple

import numpy as np

from tracekit.model import Array, DType
from tracekit.recorder.libc import memcmp, memmove


class Strip(NamedTuple):
    """N rows of the keys or the values of one request, `[Hkv, N, D]`; those of a head lie without gaps.

    Args:
        address: of row 0 of head 0.
        heads: Hkv.
        rows: N.
        width: bytes of one row of one head.
        between: bytes from one head to the next.
        dtype: of the elements.
        owner: what the memory belongs to, kept alive.
    """

    address: int
    heads: int
    rows: int
    width: int
    between: int
    dtype: DType
    owner: object

    @classmethod
    def of(cls, data: Array, dtype: DType) -> "Strip":
        """Return the rows of an array `[Hkv, N, D]`, which is copied where the rows of a head have gaps."""
        width = data.shape[2] * data.itemsize
        if data.strides[1:] != (width, data.itemsize) or data.strides[0] < 0:
            data = np.ascontiguousarray(data)
        heads, rows, _ = data.shape
        return cls(address_of(data), heads, rows, width, data.strides[0], dtype, data)

    def same(self, address: int, between: int, count: int) -> bool:
        """Whether the first rows are, in bits, those that lie at an address."""
        theirs, run = self.address, count * self.width
        for _ in range(self.heads):
            if memcmp(address, theirs, run):
                return False
            address, theirs = address + between, theirs + self.between
        return True

    def copy(self, address: int, between: int, skip: int) -> None:
        """Copy all rows but the first `skip` to an address."""
        theirs, run = self.address + skip * self.width, (self.rows - skip) * self.width
        for _ in range(self.heads):
            memmove(address, theirs, run)
            address, theirs = address + between, theirs + self.between

    def array(self) -> Array:
        """Return the bytes `[Hkv, N, width]`, without a copy."""
        span = (self.heads - 1) * self.between + self.rows * self.width
        whole = memoryview((ctypes.c_uint8 * span).from_address(self.address))
        shape, strides = (self.heads, self.rows, self.width), (self.between, self.width, 1)
        return np.ndarray(shape, np.uint8, whole, strides=strides)


def address_of(array: Array) -> int:
    """Return where the first element of an array lies."""
    address: int = array.__array_interface__["data"][0]
    return address
