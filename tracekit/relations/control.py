"""`control`: the answer lies in the error envelope around the float64 oracle."""

from collections.abc import Iterator
from typing import ClassVar

from tracekit.controls.control import ScaleTwice
from tracekit.model import AttentionCall
from tracekit.providers.base import Launch, Provider
from tracekit.relations.base import Expectation, Variant


class Control:
    """Stable is not yet right."""

    id: ClassVar[str] = "control"
    promise: ClassVar[str] = "O and LSE lie in the error envelope around the float64 oracle"
    expects: ClassVar[Expectation] = Expectation.ENVELOPE

    def applies(self, call: AttentionCall) -> str | None:
        """Any call has an exact answer."""
        return None

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call as it stands."""
        yield Variant("as recorded", Launch((call,)))

    def broken(self) -> Provider:
        """Return a kernel that applies the scale twice."""
        return ScaleTwice()
