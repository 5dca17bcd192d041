"""`RequestGate`: validate, launch, wait, commit. Whatever goes wrong before the commit, nothing moved."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import index

from tracekit.errors import UsageError
from tracekit.gate.attempts import Attempts
from tracekit.gate.attend import attend
from tracekit.gate.finite import check_answer
from tracekit.gate.launch import Extent, SlotMap, Step, attend_of
from tracekit.gate.machine import transition
from tracekit.gate.prints import Prints, differing, everything, inputs
from tracekit.gate.refusal import refuse
from tracekit.gate.state import Ledger, Phase
from tracekit.model import AttentionCall
from tracekit.model.events import Attend, Event, Evict, GraphUse, NewWeights, Preempt, Rescale, Rollback
from tracekit.providers.base import Execution, Launch, Provider, Tensors

Flags = Callable[[], Iterable[bool]]
"""Waits for the device and returns the finite flags of the launch, as they are after completion."""


class RequestGate:
    """Knows for every request what may legally come next, and lets only that through.

    It does no arithmetic: answers go through as the provider gave them. It needs no recording, and it is
    for one engine on one thread; two launches at once are refused (`G-CONCURRENT`).

    Args:
        ledger: where to begin; the ledger of an earlier gate, or an empty one.
        prove: keep a fingerprint of each committed row and refuse a row that is computed again with other
            bytes. Costs a hash of every row of Q, KV and O of each call.
    """

    def __init__(self, ledger: Ledger | None = None, *, prove: bool = False) -> None:
        self._ledger = ledger or Ledger()
        self._attempts = Attempts()
        self._known: Prints | None = {} if prove else None
        self._step: Step | None = None
        self._open: list[tuple[Attend, AttentionCall, list[Extent]]] | None = None

    @property
    def ledger(self) -> Ledger:
        """The committed state."""
        return self._ledger

    @property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of the committed state."""
        return self._ledger.digest

    @property
    def within(self) -> bool:
        """Whether a transaction is open: what is committed may still be taken back."""
        return self._open is not None

    def tell(self, event: Event) -> None:
        """Take an event that is no launch: what the engine did to a request, or to itself.

        A request whose first launch failed is none of the ledger's yet. A preemption of it, or a rollback to
        0, moves nothing there, and gives up the rows that the launch tried to write.

        Raises:
            GateRefused: it may not come next; nothing moved.
        """
        if not self._gives_up_first(event):
            self._ledger = transition(self._ledger, event)
        self._attempts.forget(event)
        if self._known:
            _forget(self._known, event)

    def _gives_up_first(self, event: Event) -> bool:
        if not isinstance(event, Preempt | Rollback) or event.request in self._ledger.requests:
            return False
        return self._attempts.of(event.request) and (isinstance(event, Preempt) or event.to == 0)

    def run(
        self,
        call: AttentionCall,
        provider: Provider,
        *,
        execution: Execution | None = None,
        model_version: int | None = None,
        graph: GraphUse | None = None,
        slots: SlotMap | None = None,
        flags: Flags | None = None,
        kernel: str = "",
    ) -> Tensors:
        """Run a call if it may come next, and commit it if it ran.

        Args:
            call: the call; its KV holds the new rows.
            provider: the kernel.
            execution: how to run it.
            model_version: weights that made Q and the new rows; None takes those in force.
            graph: the graph that the provider replays, in decode.
            slots: scales and pages of the KV, where there are any.
            flags: waits for the device and returns the finite flags of the launch.
            kernel: identity of the kernel, where its backward is to follow (`tracekit.gate.autograd`).

        Returns:
            O and LSE, as the provider gave them.

        Raises:
            GateRefused: the call may not come next, and was not run; or its answer is none. Either way
                nothing moved, and the call may be tried again.
            Exception: what the provider raised; nothing moved.
        """
        ledger = self._ledger
        step = self._step
        if step is None or call.rows is not step.rows:
            step = self._step = Step(call.rows)
        spans = step.extents
        version = ledger.model_version if model_version is None else int(index(model_version))
        event = attend_of(call, step, version, graph, slots or _NOWHERE, kernel)
        after = attend(ledger, event)
        if self._attempts:
            self._attempts.check(event, call, spans)
        if self._open is not None:
            self._open.append((event, call, spans))
        given = None if self._known is None else inputs(call, spans, held=True)
        try:
            answers = provider.run(Launch((call,), execution or _DEFAULT)).tensors
            if len(answers) != 1:
                refuse("G-SHAPE", f"{len(answers)} answers to one call", layer=call.layer)
            (answer,) = answers
            if flags is not None:
                _check_flags(call, flags())
            check_answer(call, answer)
            prints = _NO_PRINTS
            if self._known is not None and given is not None:
                prints = _prove(call, spans, answer, given, self._known)
            if self._ledger is not ledger:
                refuse("G-CONCURRENT", "another event was committed meanwhile", layer=call.layer)
        except BaseException:
            if self._ledger is ledger or not _given_up(self._ledger, event):
                self._attempts.add(event, call, spans)
            raise
        self._ledger = after
        if self._attempts:
            self._attempts.succeeded(event)
        if self._known is not None:
            self._known.update(prints)
        return answer

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All layers of a pass, or none: where the block raises, the ledger is what it was before it.

        The launches that ran in it count as failed: a retry must write the same slots and the same bytes. So
        do those that had failed before it, whatever was told in it.

        Raises:
            UsageError: `G-NESTED`, transactions do not nest.
        """
        if self._open is not None:
            raise UsageError("a transaction of the gate is open already; end it first.", rule="G-NESTED")
        ledger, known = self._ledger, None if self._known is None else dict(self._known)
        failed = self._attempts.copy()
        self._open = []
        try:
            yield
        except BaseException:
            self._ledger, self._known = ledger, known
            for event, call, spans in self._open:
                self._attempts.add(event, call, spans)
            self._attempts.keep(failed)
            raise
        finally:
            self._open = None


def _given_up(ledger: Ledger, event: Attend) -> bool:
    """Whether a request of a launch lost the rows before it while it ran: nothing of it is tried again."""
    states = [(ledger.requests.get(span.request), span.first) for span in event.spans]
    return any(
        state is not None and (state.phase in (Phase.PREEMPTED, Phase.FINISHED) or state.length < first)
        for state, first in states
    )


def _forget(known: Prints, event: Event) -> None:
    """Drop the prints of rows that an event allows to be other rows."""
    if isinstance(event, NewWeights | Rescale):
        known.clear()
        return
    if isinstance(event, Rollback):
        gone = [place for place in known if place.request == event.request and place.behind(event.to)]
    elif isinstance(event, Evict) and event.before is None:  # its name is free for another request
        gone = [place for place in known if place.request == event.request]
    else:
        return
    for place in gone:
        del known[place]


def _prove(call: AttentionCall, spans: list[Extent], answer: Tensors, given: Prints, known: Prints) -> Prints:
    """Return the prints of a launch; refuse other bytes of a row that was committed before."""
    prints = everything(call, spans, answer)
    for place in differing(given, prints):
        refuse("G-BYTES", "the kernel wrote to what it was given", **place.fields)
    for place in differing(known, prints):
        refuse("G-BYTES", "other bytes than when it was committed", **place.fields)
    return prints


_DEFAULT = Execution()
_NOWHERE: SlotMap = {}
_NO_PRINTS: Prints = {}


def _check_flags(call: AttentionCall, flags: Iterable[bool]) -> None:
    number = -1
    for number, flag in enumerate(flags):
        if not flag:
            refuse("G-FLAG", f"finite flag {number} is false", layer=call.layer)
    if number < 0:
        refuse("G-FLAG", "no finite flag came back", layer=call.layer)
