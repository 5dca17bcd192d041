"""`rerun`: the same call gives the same bits again, in the same process."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np

from tracekit.controls.rerun import StateLeftOver
from tracekit.model import AttentionCall, Bits
from tracekit.providers.base import Launch, Provider
from tracekit.relations.arrange import foreign
from tracekit.relations.base import Expectation, Variant


class Rerun:
    """Nothing is left over from one launch to the next."""

    id: ClassVar[str] = "rerun"
    promise: ClassVar[str] = "the same call gives the same bits again, whatever ran in between"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def applies(self, call: AttentionCall) -> str | None:
        """Any call can be run again."""
        return None

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call again, and on both sides of calls with other numbers and another size.

        The calls in between hold rows of other requests: they are run, and not compared.
        """
        yield Variant("again", Launch((call,)))
        other = foreign(call)
        rolled = replace(other, q=Bits(np.roll(other.q.data, 1, axis=2), other.q.dtype))
        yield Variant("around another call", Launch((call, rolled, call, other.take(np.arange(1)), call)))

    def broken(self) -> Provider:
        """Return a kernel that keeps state of its last launch."""
        return StateLeftOver()
