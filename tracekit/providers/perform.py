"""Run a launch as it was asked for: after what ran before it, in the mode that this left behind, captured."""

import ctypes
import platform
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tracekit.errors import Unsupported
from tracekit.providers.base import Answer, Launch, Provider
from tracekit.providers.graphs.sequence import replayed
from tracekit.providers.mode import FloatMode

__all__ = ["FloatMode", "perform"]


def perform(provider: Provider, launch: Launch) -> Answer:
    """Run the launches before a launch, whose answers nobody reads, and then the launch in its mode.

    Raises:
        Unsupported: as `Provider.run`, and as `replayed` for a capture; `P-MODE` where the mode of this
            processor cannot be set.
    """
    for earlier in launch.before:
        perform(provider, earlier)
    run = provider.run if launch.execution.graph is None else partial(replayed, provider)
    if launch.execution.mode is None:
        return run(launch)
    # In a thread of its own, for threads begin in the mode of the one that starts them: those of OpenMP, too,
    # which belong to the thread that asked for them. Set in a thread that has its team already, a mode
    # reaches the caller alone, and which rows the caller takes is a race.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(left_in, launch.execution.mode).result()
        return thread.submit(run, launch).result()


# The word of a saved C environment (fenv_t) that arithmetic follows: its place, and the bits of each mode.
_WORDS = {
    "x86_64": (28, {FloatMode.FLUSHED: 0x8040, FloatMode.TOWARD_ZERO: 3 << 13}),
    "aarch64": (0, {FloatMode.FLUSHED: 1 << 24, FloatMode.TOWARD_ZERO: 3 << 22}),
}


def left_in(mode: FloatMode) -> None:
    """Change the mode of this thread, as a library that forgot to put it back.

    Raises:
        Unsupported: `P-MODE` where the mode of this processor cannot be set.
    """
    if platform.machine() not in _WORDS:
        raise Unsupported(f"the mode of a {platform.machine()} cannot be set here.", rule="P-MODE")
    at, words = _WORDS[platform.machine()]
    library, saved = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.fegetenv(saved)
    word = int.from_bytes(saved.raw[at : at + 4], "little") | words[mode]
    library.fesetenv(saved.raw[:at] + word.to_bytes(4, "little") + saved.raw[at + 4 :])
