"""Run a launch as it was asked for: after what ran before it, in the mode that this left behind, captured."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

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
    with left_in(launch.execution.mode):
        return provider.run(launch) if launch.execution.graph is None else replayed(provider, launch)


# The word of a saved C environment (fenv_t) that arithmetic follows: its place, and the bits of each mode.
_WORDS = {
    "x86_64": (28, {FloatMode.FLUSHED: 0x8040, FloatMode.TOWARD_ZERO: 3 << 13}),
    "aarch64": (0, {FloatMode.FLUSHED: 1 << 24, FloatMode.TOWARD_ZERO: 3 << 22}),
}


@contextmanager
def left_in(mode: FloatMode | None) -> Iterator[None]:
    """Change the mode of this thread, as a library that forgot to put it back, and put it back at the end."""
    if mode is None:
        yield
        return
    if platform.machine() not in _WORDS:
        raise Unsupported(f"the mode of a {platform.machine()} cannot be set here.", rule="P-MODE")
    at, bits = _WORDS[platform.machine()]
    library, saved = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.fegetenv(saved)
    word = int.from_bytes(saved.raw[at : at + 4], "little") | bits[mode]
    library.fesetenv(saved.raw[:at] + word.to_bytes(4, "little") + saved.raw[at + 4 :])
    try:
        yield
    finally:
        library.fesetenv(saved)
