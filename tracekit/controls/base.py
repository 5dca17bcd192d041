"""What the broken twins share: a correct kernel, and the one place where a twin departs from it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tracekit.errors import Unsupported
from tracekit.model import Array, AttentionCall, ExecutedIdentity, KVFamily, Lists, Ranges, Selection
from tracekit.providers.base import Answer, Capabilities, Execution, Launch, Provider, Tensors
from tracekit.providers.graphs.base import Capturable, Pool, StaticLaunch
from tracekit.providers.oracle import Oracle
from tracekit.providers.registry import create
from tracekit.verdict import ClaimId


class Correct:
    """TKA-1 where it takes a call, the oracle where it does not: each keeps the promises a twin breaks."""

    id = "correct"

    def __init__(self) -> None:
        self._tka1, self._oracle = create("tka1"), Oracle()

    def capabilities(self) -> Capabilities:
        """What the oracle takes, which is more, and how TKA-1 can be launched, split and trained."""
        how, what = self._tka1.capabilities(), self._oracle.capabilities()
        return replace(what, graphs=how.graphs, schedules=how.schedules, splits=True, grad=True)

    def advertised(self) -> frozenset[ClaimId]:
        """Promises are made by the kernels themselves."""
        return frozenset()

    def identity(self) -> ExecutedIdentity:
        """The identity of TKA-1; an answer carries what ran."""
        return self._tka1.identity()

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why neither can run a call."""
        return self._tka1.refuses(call) and self._oracle.refuses(call)

    def run(self, launch: Launch) -> Answer:
        """Run a launch by the first of the two that takes all of its calls."""
        takes = not any(self._tka1.refuses(call) for call in launch.calls)
        if not takes and (launch.execution.split is not None or launch.execution.grad):
            raise Unsupported(
                "TKA-1 does not take the call, and the oracle has no ranks and no backward.", rule="P-REFUSED"
            )
        return (self._tka1 if takes else self._oracle).run(launch)

    def static(self, calls: Sequence[AttentionCall], execution: Execution, pool: Pool) -> StaticLaunch:
        """Return a static launch of TKA-1; the oracle has none.

        Raises:
            Unsupported: `P-GRAPH`, or a call is refused.
        """
        if not isinstance(self._tka1, Capturable):
            raise Unsupported("the correct kernel cannot be captured.", rule="P-GRAPH")
        return self._tka1.static(calls, execution, pool)


class Twin:
    """A correct kernel with one fault; a subclass overrides `answer`, and differs in at most five lines.

    A twin keeps state between launches where its fault does. Its first launch is the baseline and is
    answered rightly; `fault` says in a clause what is wrong afterwards.

    Args:
        correct: the kernel to spoil.
    """

    id = "twin"
    fault = ""

    def __init__(self, correct: Provider | None = None) -> None:
        self.correct: Provider = Correct() if correct is None else correct

    def capabilities(self) -> Capabilities:
        """As the correct kernel."""
        return self.correct.capabilities()

    def advertised(self) -> frozenset[ClaimId]:
        """No promise."""
        return frozenset()

    def identity(self) -> ExecutedIdentity:
        """As the correct kernel: a broken build does not say so."""
        return self.correct.identity()

    def refuses(self, call: AttentionCall) -> str | None:
        """As the correct kernel."""
        return self.correct.refuses(call)

    def run(self, launch: Launch) -> Answer:
        """Run the calls one by one through `answer`."""
        return Answer(
            tuple(self.answer(call, launch.execution) for call in launch.calls), self.correct.identity()
        )

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call."""
        return self.right(call, execution)

    def right(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call as the correct kernel does."""
        return self.correct.run(Launch((call,), execution)).tensors[0]


Keep = Callable[[Array, int, KVFamily], Array]
"""Ids that a row reads, the row, the family -> the ids that are left."""


def keep(call: AttentionCall, chosen: Keep) -> AttentionCall:
    """Return the call with fewer keys a row."""
    families: dict[KVFamily, Ranges | Lists] = {}
    for family, part in call.selection.families.items():
        rows = [chosen(part.row(t), t, family) for t in range(call.num_rows)]
        families[family] = _ranges(rows) if isinstance(part, Ranges) else Lists.of(rows)
    return replace(call, selection=Selection(families), launch=None)


def without_oldest(call: AttentionCall) -> AttentionCall:
    """Return the call with the first key of each row and family dropped."""
    return keep(call, lambda ids, _row, _family: ids[1:])


def _ranges(rows: list[Array]) -> Ranges:
    """Runs of ids as ranges, for kernels that take no lists."""
    lo = np.array([ids[0] if ids.size else 0 for ids in rows], np.int64)
    return Ranges(lo, lo + np.array([ids.size for ids in rows], np.int64))
