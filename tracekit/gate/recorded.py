"""Whether the history of a recording was legal: every transition proved again, against the calls themselves.

Nothing that a trace says of its own legality is believed. The passes say which rows each step computed, the
calls say what each layer read; both go through the state machine of docs/gate.md, and must agree.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tracekit.errors import GateRefused
from tracekit.gate.machine import transition
from tracekit.gate.owed import Owed
from tracekit.gate.refusal import refuse
from tracekit.gate.state import Ledger
from tracekit.gate.state import Rows as Kept
from tracekit.model import AttentionCall, KVFamily, Recording, Rows, Tag
from tracekit.model.events import Attend, Read, Span
from tracekit.model.history import Entry, Pass, PassBackward, PassRows, Unproven


class Legality(StrEnum):
    """What can be said of a history."""

    LEGAL = "legal"
    ILLEGAL = "illegal"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Judgement:
    """Whether a history was legal.

    Args:
        status: legal only where every transition was proved and no call is missing but by a filter.
        reason: why, in one sentence.
        code: of the broken rule, where one is broken.
        place: entry of the history (0-based), step, request, layer, family, position; as far as known.
        entries: entries of the history that were proved.
        calls: calls of the trace that were proved.
        assumed: launches that a filter left out; their reads are taken to be legal.
        ledger: SHA-256 of the state at the end of what was proved.
    """

    status: Legality
    reason: str
    code: str = ""
    place: Mapping[str, Any] = field(default_factory=dict)
    entries: int = 0
    calls: int = 0
    assumed: int = 0
    ledger: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "status": self.status.value,
            "reason": self.reason,
            "code": self.code,
            "place": dict(self.place),
            "entries": self.entries,
            "calls": self.calls,
            "assumed": self.assumed,
            "ledger": self.ledger,
        }


@dataclass(frozen=True)
class Held:
    """KV rows `first .. end - 1` that a call read, and their write epoch."""

    first: int
    end: int
    cache_version: int


@dataclass(frozen=True, eq=False)
class Launch:
    """What a history needs to know of a call: no tensor of it."""

    step: int
    layer: int
    rows: Rows
    held: Mapping[str, Mapping[KVFamily, Held]]
    window: int | None
    kernel: str

    @classmethod
    def of(cls, call: AttentionCall) -> "Launch":
        """Return what is known of a call."""
        held = {
            str(key): {
                family: Held(rows.first, rows.end, rows.generation) for family, rows in families.items()
            }
            for key, families in call.kv.items()
        }
        kernel = call.provenance.executed.kernel
        return cls(call.step, call.layer, call.rows, held, call.conventions.window, kernel)


def judge(recording: Recording, calls: Iterable[AttentionCall | Launch]) -> Judgement:
    """Prove the history of a trace again.

    Args:
        recording: with its history.
        calls: every call of the trace, or what `Launch.of` keeps of it.
    """
    if recording.history is None:
        return Judgement(Legality.UNKNOWN, "no history was recorded")
    unproven = next((entry.reason for entry in recording.history if isinstance(entry, Unproven)), None)
    if unproven is not None and len(recording.history) == 1:
        return Judgement(Legality.UNKNOWN, f"there is no history: {unproven}")
    prover = Prover(recording, [call if isinstance(call, Launch) else Launch.of(call) for call in calls])
    proved, count = 0, len(recording.history)
    try:
        for entry in recording.history:
            prover.take(entry)
            proved += 1
        prover.finish()
    except GateRefused as refused:
        place = {**_where(recording.history[proved] if proved < count else None, proved), **refused.fields}
        return prover.judgement(Legality.ILLEGAL, str(refused), proved, refused.rule, place)
    cut = next((line for line in recording.ledger if line.cut), None)
    if cut is not None:
        return prover.judgement(Legality.UNKNOWN, f"step {cut.step} lost calls: {cut.cut}", proved)
    if unproven is not None:
        return prover.judgement(Legality.UNKNOWN, unproven, proved)
    if not prover.calls:
        return prover.judgement(Legality.UNKNOWN, "it speaks of no call of the trace", proved)
    return prover.judgement(Legality.LEGAL, f"{count} entries and {prover.calls} calls were proved", proved)


def _where(entry: Entry | None, number: int) -> dict[str, Any]:
    if entry is None:
        return {}
    return {"entry": number, "step": entry.step} if hasattr(entry, "step") else {"entry": number}


class Prover:
    """A history on its way through the state machine.

    Args:
        recording: what surrounds the calls.
        launches: every call of the trace.
    """

    def __init__(self, recording: Recording, launches: Iterable[Launch]) -> None:
        self.ledger = Ledger(model_version=recording.identity.model_version)
        self.calls = self.assumed = 0
        self._of_step: dict[int, dict[int, list[Launch]]] = defaultdict(lambda: defaultdict(list))
        self._pattern: dict[int, Launch] = {}
        for launch in launches:
            self._of_step[launch.step][launch.layer].append(launch)
            self._pattern.setdefault(launch.layer, launch)
        self._filtered = {line.step: line.filtered for line in recording.ledger if line.tag is Tag.NORMAL}
        self._cut = {line.step for line in recording.ledger if line.cut}
        self._gradients = Owed()

    def take(self, entry: Entry) -> None:
        """Prove one entry.

        Raises:
            GateRefused: it was not legal.
        """
        if isinstance(entry, Unproven):
            return
        if isinstance(entry, PassBackward):
            self.ledger = self._gradients.paid(self.ledger, entry, self._pattern)
            return
        if not isinstance(entry, Pass):
            self.ledger = transition(self.ledger, entry)
            return
        before, launched = self.ledger, self._of_step.pop(entry.step, {})
        layers = [layer for layer in sorted(self._pattern) if layer in entry.layers or not entry.layers]
        missing = [layer for layer in layers if layer not in launched]
        beyond = [layer for layer in launched if layer not in layers]
        if beyond:
            refuse("G-TRACE-CALL", "the pass is not of this layer", step=entry.step, layer=min(beyond))
        whole = not entry.failed and entry.step not in self._cut
        if whole and len(missing) > self._filtered.get(entry.step, 0):
            text = "the layer has no call in this pass, and no filter left it out"
            refuse("G-TRACE-CALL", text, step=entry.step, layer=missing[0])
        for layer in layers:
            calls = launched.get(layer, [])
            if calls or not entry.failed:
                self._launch(entry, layer, calls)
        if entry.failed and not entry.layers:  # a pass that names its layers has those, and moves no rows
            self.ledger = before
            self._gradients.failed(entry.step)

    def finish(self) -> None:
        """Every call belongs to a pass.

        Raises:
            GateRefused: `G-TRACE-CALL`.
        """
        if self._of_step:
            refuse("G-TRACE-CALL", "its calls are in no pass of the history", step=min(self._of_step))

    def judgement(
        self,
        status: Legality,
        reason: str,
        entries: int,
        code: str = "",
        place: Mapping[str, Any] | None = None,
    ) -> Judgement:
        """Return what was found so far."""
        digest = self.ledger.digest
        return Judgement(status, reason, code, place or {}, entries, self.calls, self.assumed, digest)

    def _launch(self, entry: Pass, layer: int, calls: list[Launch]) -> None:
        """One layer of a pass: what its calls read, and where a filter left them out, what is there.

        The processes of a tensor-parallel group have a call each; all of them are held to the same rows.
        """
        held: dict[str, Mapping[KVFamily, Held]] = {}
        for call in calls:
            _check_rows(entry, call)
            for name, families in call.held.items():
                if held.setdefault(name, families) != families:
                    place = {"step": entry.step, "layer": layer, "request": name}
                    refuse("G-TRACE-CALL", "two calls of the layer read other rows", **place)
        spans = tuple(self._span(rows, layer, held.get(rows.request)) for rows in entry.rows)
        like = calls[0] if calls else self._pattern[layer]
        kernel = like.kernel if layer in entry.owing else ""
        event = Attend(layer, spans, entry.model_version, like.window, kernel=kernel)
        self.ledger = transition(self.ledger, event)
        if kernel:
            self._gradients.owe(entry.step, layer, self.ledger.epoch)
        self.calls += len(calls)
        self.assumed += not calls

    def _span(self, rows: PassRows, layer: int, held: Mapping[KVFamily, Held] | None) -> Span:
        if held is None:
            families = next(iter(self._pattern[layer].held.values()))
            reads = tuple(self._assume(rows, layer, family) for family in families)
        else:
            reads = tuple(_read(rows, layer, family, kv) for family, kv in held.items())
        return Span(rows.request, rows.first, rows.end, rows.mode, reads)

    def _assume(self, rows: PassRows, layer: int, family: KVFamily) -> Read:
        """What a launch that was not recorded read: the rows that are there."""
        request = self.ledger.requests.get(rows.request)
        stream = None if request is None else request.streams.get((layer, family))
        fresh = stream is None or stream.rows is Kept.LOST or rows.first == 0
        return Read(family, rows.cache_version, 0 if fresh or stream is None else stream.first)


def _read(rows: PassRows, layer: int, family: KVFamily, held: Held) -> Read:
    if held.end < rows.end // family.ratio:
        place = {"request": rows.request, "layer": layer, "family": family.value, "position": rows.first}
        text = f"the call has the rows before {held.end}, and the request {rows.end // family.ratio}"
        refuse("G-KV-MISSING", text, **place)
    return Read(family, held.cache_version, held.first)


def _check_rows(entry: Pass, call: Launch) -> None:
    """The rows of a call are rows of its pass."""
    spans = {rows.request: rows for rows in entry.rows}
    for number, key in enumerate(call.rows.requests):
        rows = spans.get(str(key))
        place = {"step": entry.step, "layer": call.layer, "request": str(key)}
        if rows is None:
            refuse("G-TRACE-CALL", "the pass does not have the request", **place)
        positions = call.rows.positions[call.rows.request == number]
        outside = positions[(positions < rows.first) | (positions >= rows.end)]
        if outside.size:
            text = f"the pass computes [{rows.first}, {rows.end})"
            refuse("G-TRACE-CALL", text, **place, position=int(outside[0]))
