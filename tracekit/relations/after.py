"""`after`: what ran before in the process changes no bit."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from tracekit.controls.after import RoomOfLastLaunch
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Launch, Provider
from tracekit.providers.mode import FloatMode
from tracekit.relations.arrange import foreign
from tracekit.relations.base import Expectation, Variant
from tracekit.relations.company import in_company


class After:
    """A launch has no inputs but its arguments."""

    id: ClassVar[str] = "after"
    promise: ClassVar[str] = "the same bits after any other launch, in any mode that it left behind"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def applies(self, call: AttentionCall) -> str | None:
        """Anything may run before any call."""
        return None

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call after a smaller and a larger launch, after other numbers of threads, in two modes.

        What runs before is not compared.
        """
        other = foreign(call)
        yield _after("a launch of one row", call, Launch((other.take(np.arange(1)),)))
        (_, larger), *_ = in_company(call)
        yield _after("a larger launch", call, Launch((larger,)))
        threads = (Launch((other,), Execution(threads=n)) for n in (1, 3))
        yield _after("launches on 1 and on 3 threads", call, *threads)
        for mode in FloatMode:
            yield Variant(f"{mode} left on", Launch((call,), Execution(mode=mode)))

    def broken(self) -> Provider:
        """Return a kernel whose room is that of the launch before."""
        return RoomOfLastLaunch()


def _after(what: str, call: AttentionCall, *before: Launch) -> Variant:
    return Variant(f"after {what}", Launch((call,), before=before))
