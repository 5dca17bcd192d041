"""Memory for what a recording keeps: taken in large blocks, so that a copy costs no allocation.

Small buffers that are kept for good would take the place of those that the engine frees and takes again, and
both would pay for the page faults of new memory. numpy asks for huge pages for blocks of this size.
"""

import ctypes

import numpy as np

from tracekit.model import Array

BLOCK = 32 << 20
"""Bytes of a block; what of it was never written takes no memory."""
_ALIGNMENT = 64


class Arena:
    """Hands out memory that is never taken back; a block is freed with the last array that lies in it."""

    def __init__(self) -> None:
        self._block: Array = np.empty(0, np.uint8)
        self._address = 0
        self._used = 0

    def copy(self, address: int, size: int) -> Array:
        """Return a copy of bytes that lie at an address of this process, uint8 `[size]`."""
        room = self._take(size)
        ctypes.memmove(self._address + room.start, address, size)
        return self._block[room]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Return an array that nobody has written to."""
        size = int(np.prod(shape)) * dtype.itemsize
        room = self._take(size)
        return self._block[room].view(dtype).reshape(shape)

    def _take(self, size: int) -> slice:
        """The next bytes of the block, which is a new one where they do not fit."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + size > self._block.size:
            self._block = np.empty(max(BLOCK, size), np.uint8)
            self._address, start = int(self._block.ctypes.data), 0
        self._used = start + size
        return slice(start, start + size)
