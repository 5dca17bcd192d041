"""Memory for what a recording keeps: taken in large blocks, so that a copy costs no allocation.

Small buffers that are kept for good would take the place of those that the engine frees and takes again, and
the engine would then pay for new memory.
"""

import math

import numpy as np

from tracekit.model import Array
from tracekit.recorder.libc import memmove
from tracekit.recorder.spare import BLOCK, Spare

_WORTH = 8 << 20
"""Bytes from which on a recording is taken to want further blocks; small ones have none made ahead."""
_ALIGNMENT = 64


class Arena:
    """Hands out memory that is never taken back; a block is freed with the last array that lies in it."""

    def __init__(self) -> None:
        self._block: Array = np.empty(0, np.uint8)
        self._address = 0
        self._used = 0
        self._spare = Spare()
        self._large = False

    def copy(self, address: int, size: int) -> Array:
        """Return a copy of bytes that lie at an address of this process, uint8 `[size]`."""
        start = self._take(size)
        memmove(self._address + start, address, size)
        return self._block[start : start + size]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Return an array that nobody has written to."""
        size = math.prod(shape) * dtype.itemsize
        start = self._take(size)
        return self._block[start : start + size].view(dtype).reshape(shape)

    def work(self) -> None:
        """A step of the engine begins."""
        self._spare.work()

    def rest(self) -> None:
        """A step has ended: the next blocks may be made ready."""
        self._large = self._large or self._used > _WORTH
        if self._large:
            self._spare.rest()

    def _take(self, size: int) -> int:
        """Where the next bytes of the block begin, which is a new one where they do not fit."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + size > self._block.size:
            self._block = self._spare.take() if size <= BLOCK else np.empty(size, np.uint8)
            self._address, start = int(self._block.ctypes.data), 0
        self._used = start + size
        return start
