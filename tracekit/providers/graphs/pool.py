"""Memory for static buffers that behaves as a device's: what is given back stays mapped and is used again."""

import weakref
from collections import defaultdict

import numpy as np
import numpy.typing as npt

from tracekit.model import Array
from tracekit.providers.placement import Fill

_SMALLEST = 4096


class HostPool:
    """A caching allocator: blocks of powers of two, handed on as soon as the array over them is gone.

    An address outlives its array, as that of a device tensor does: whoever kept it reads what the next owner
    of the block wrote there.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)

    def empty(self, shape: tuple[int, ...], words: npt.DTypeLike) -> Array:
        """Return an array `[*shape]` of whatever stood there; its block is free again when it is gone."""
        count = int(np.prod(shape)) * np.dtype(words).itemsize
        size = 1 << max(count, _SMALLEST).bit_length()
        free = self._free[size]
        block = free.pop() if free else np.zeros(size, np.uint8)
        array: Array = block[:count].view(words).reshape(shape)
        weakref.finalize(array, free.append, block).atexit = False
        return array

    def use_up(self, fill: Fill) -> None:
        """Write over every block that is free."""
        byte = 0x7F if fill is Fill.NANS else 0xA5
        for blocks in self._free.values():
            for block in blocks:
                block.fill(byte)
