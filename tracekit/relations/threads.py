"""`threads`: the number of threads changes no bit."""

from collections.abc import Iterator
from typing import ClassVar

from tracekit.controls.threads import PlannedThreads
from tracekit.env import settings
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Launch, Provider
from tracekit.relations.base import Expectation, Variant


class Threads:
    """Who computes a sum does not decide its order."""

    id: ClassVar[str] = "threads"
    promise: ClassVar[str] = "the number of threads changes no bit"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def applies(self, call: AttentionCall) -> str | None:
        """Any call can be run with another number of threads."""
        return None

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call with 1, 2 and 3 threads and with as many as there are cores."""
        for threads in sorted({1, 2, 3, settings().threads}):
            name = f"{threads} thread{'s' if threads > 1 else ''}"
            yield Variant(name, Launch((call,), Execution(threads=threads)))

    def broken(self) -> Provider:
        """Return a kernel with room for the threads of its first launch only."""
        return PlannedThreads()
