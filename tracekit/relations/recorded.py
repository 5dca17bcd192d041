"""`recorded`: the engine's kernel on its recorded launch gives the recorded bits."""

from collections.abc import Iterator
from typing import ClassVar

from tracekit.controls.recorded import RoundingDrift
from tracekit.model import AttentionCall
from tracekit.providers.base import Launch, Provider
from tracekit.relations.base import Expectation, Variant


class Recorded:
    """The kernel of the trace, run again, gives what it gave."""

    id: ClassVar[str] = "recorded"
    promise: ClassVar[str] = "the recorded kernel gives the recorded bits again"
    expects: ClassVar[Expectation] = Expectation.TRACE

    def applies(self, call: AttentionCall) -> str | None:
        """Any call; whether its output is evidence is for the replay to say."""
        return None

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call as it stands, with its launch plan."""
        yield Variant("as recorded", Launch((call,)))

    def broken(self) -> Provider:
        """Return a kernel whose last bit has drifted."""
        return RoundingDrift()
