"""Buffers of a launch with a fill around them: what reads there, or writes there, is found out."""

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL

import numpy as np
import numpy.typing as npt

from tracekit.errors import ProviderFailed
from tracekit.model import Array, DType
from tracekit.providers.placement import Fill

GUARD = 4096
"""Bytes of canary before and behind each buffer: more than any vector, tile or line that a kernel stores."""

_M_PERTURB = -6
_HUGE = 0x7F


class Guarded:
    """Buffers that lie between canaries; `check` refuses what was written outside of outputs.

    Args:
        fill: what canaries and outputs hold before the launch.
    """

    def __init__(self, fill: Fill) -> None:
        self.fill = fill
        self._guards: list[tuple[str, Array, bytes]] = []

    def held(self, array: Array, dtype: DType | None = None, name: str = "an input") -> Array:
        """Return a copy of an input between canaries.

        Args:
            array: any shape.
            dtype: of what it holds; None for numbers of the launch, which get canaries of binary32.
            name: for the message.
        """
        place = self._place(array.shape, array.dtype, dtype or DType.FLOAT32, name)
        place[...] = array
        self._guards.append((name, place, place.tobytes()))
        return place

    def empty(self, shape: tuple[int, ...], dtype: DType, name: str = "an output") -> Array:
        """Return an output `[*shape]` full of the fill, between canaries."""
        place = self._place(shape, dtype.container, dtype, name)
        place.fill(self.fill.pattern(dtype))
        return place

    def check(self) -> None:
        """Refuse a launch that wrote into an input or beside a buffer.

        Raises:
            ProviderFailed: `P-CANARY`.
        """
        for name, array, before in self._guards:
            if array.tobytes() != before:
                raise ProviderFailed(
                    f"the kernel wrote into {name}; it may write into its outputs alone.", rule="P-CANARY"
                )

    def _place(self, shape: tuple[int, ...], words: npt.DTypeLike, dtype: DType, name: str) -> Array:
        """An array inside a larger one, whose ends are kept to be compared."""
        wide, size = dtype.container, int(np.prod(shape)) * np.dtype(words).itemsize
        body = -(-size // 64) * 64
        memory = np.full((body + 2 * GUARD) // wide.itemsize, self.fill.pattern(dtype), wide).view(np.uint8)
        for where, part in (("before", memory[:GUARD]), ("behind", memory[GUARD + size :])):
            self._guards.append((f"memory {where} {name}", part, part.tobytes()))
        inside: Array = memory[GUARD : GUARD + size].view(words).reshape(shape)
        return inside


@contextmanager
def filled_heap(fill: Fill) -> Iterator[None]:
    """Let memory that a kernel asks of the C library hold something: a workspace is no zeros then.

    glibc sets every byte alike, so NaN payloads become 0x7F, the largest numbers. Small pieces that a thread
    has just freed come back as they were. Other libraries do nothing.
    """
    mallopt = getattr(CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_PERTURB, 0xFF ^ (_HUGE if fill is Fill.NANS else 0xA5))
    try:
        yield
    finally:
        mallopt(_M_PERTURB, 0)
