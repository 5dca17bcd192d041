"""SIGTERM ends a process at once; where nobody handles it, what was recorded is written first.

The handler of a process is one, however many engines of it are recorded: it is installed with the first
recording and taken away with the last. A handler of the program's own stays what it is.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_open: list[tuple[object, Callable[[], None]]] = []


def save_when_terminated(recording: object, save: Callable[[], None]) -> None:
    """Save a recording before SIGTERM ends the process, from now until `forget`."""
    ours = threading.current_thread() is threading.main_thread()
    handler: Any = signal.getsignal(signal.SIGTERM)
    if handler is not _ended:
        if not ours or handler is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, _ended)
    _open.append((recording, save))


def forget(recording: object) -> None:
    """A recording is over; with the last one SIGTERM means what it meant before."""
    _open[:] = [pair for pair in _open if pair[0] is not recording]
    handler: Any = signal.getsignal(signal.SIGTERM)
    if not _open and handler is _ended and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _ended(number: int, _: FrameType | None) -> None:
    for _recording, save in tuple(_open):
        save()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
