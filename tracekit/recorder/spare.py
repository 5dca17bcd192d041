"""Blocks of memory that are there already when a step wants them.

The first write to a page of new memory costs several times what it is written for: the system has to find
the page and clear it. So blocks are written to ahead, by a thread, while the engine is between two steps.
"""

import ctypes
import threading
from collections import deque

import numpy as np

from tracekit.model import Array

BLOCK = 32 << 20
"""Bytes of a block; what of it was never written takes no memory."""
AHEAD = 2
"""Blocks that are made ready; steps that take more before the engine rests clear the rest themselves."""
_PIECE = 2 << 20
"""Bytes between two looks at whether the engine still rests: a huge page."""
_PATIENCE = 1.0
"""Seconds after which the thread does not wait for the end of a step any more, but ends."""


class Spare:
    """A few blocks that nobody uses yet.

    `rest` and `work` say what the engine does. The thread lives no longer than it has blocks to make, and
    only it and `take` touch them, so that a block is never written by two.
    """

    def __init__(self) -> None:
        self._ready: deque[Array] = deque()
        self._resting = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> Array:
        """Return a block, uint8 `[BLOCK]`; a new one where none is ready."""
        return self._ready.popleft() if self._ready else np.empty(BLOCK, np.uint8)

    def work(self) -> None:
        """A step begins: the machine is the engine's."""
        self._resting.clear()

    def rest(self) -> None:
        """A step has ended: make blocks until the next one begins."""
        self._resting.set()
        if len(self._ready) < AHEAD and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._fill, name="tracekit memory", daemon=True)
            self._thread.start()

    def settle(self) -> None:
        """Wait until the blocks are made, or until a step has kept them from being made for a while."""
        if self._thread is not None:
            self._thread.join()

    def _fill(self) -> None:
        while len(self._ready) < AHEAD:
            try:
                block = np.empty(BLOCK, np.uint8)
            except MemoryError:
                return  # whoever needs the memory will say so
            start = block.ctypes.data
            for offset in range(0, BLOCK, _PIECE):
                if not self._resting.wait(_PATIENCE):
                    return
                ctypes.memset(start + offset, 0, _PIECE)
            self._ready.append(block)
