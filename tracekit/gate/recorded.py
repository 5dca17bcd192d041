"""Whether the history of a recording was legal: every transition proved again, against the calls themselves.

Nothing that a trace says of its own legality is believed. The passes say which rows each step computed, the
calls say what each layer read; both go through the state machine of docs/gate.md, and must agree.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tracekit.errors import GateRefused
from tracekit.gate.machine import transition
from tracekit.gate.memory import blocks
from tracekit.gate.owed import Owed
from tracekit.gate.refusal import refuse
from tracekit.gate.state import Ledger
from tracekit.gate.state import Rows as Kept
from tracekit.gate.trace_launch import Held, Launch, Scale
from tracekit.model import AttentionCall, KVFamily, Recording, Tag
from tracekit.model.events import Attend, Read, Scales, Span
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
        passes = [entry for entry in recording.history or () if isinstance(entry, Pass)]
        self._planned: dict[int, dict[str, PassRows]] = defaultdict(dict)
        for entry in passes:
            self._planned[entry.step].update({rows.request: rows for rows in entry.rows})
        self._memory = CallMemory(self._of_step, {entry.step for entry in passes if not entry.failed})
        self._gradients = Owed()
        self._step = -1
        self._launched: Mapping[int, list[Launch]] = {}
        self._computed: set[str] = set()

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
        if entry.step != self._step:
            self._begin(entry)
        twice = self._computed & {rows.request for rows in entry.rows}
        if twice:
            text = "the step has computed its rows already"
            refuse("G-TRACE-CALL", text, step=entry.step, request=min(twice))
        self._computed |= {rows.request for rows in entry.rows}
        before = self.ledger
        for layer in self._layers(entry):
            calls = self._launched.get(layer, [])
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

    def _layers(self, entry: Pass) -> list[int]:
        """The layers of the trace that a pass is of."""
        return [layer for layer in sorted(self._pattern) if layer in entry.layers or not entry.layers]

    def _begin(self, entry: Pass) -> None:
        """The calls of the step are there, and each row of them is one that the step planned."""
        self._step, self._computed = entry.step, set()
        launched = self._launched = self._of_step.pop(entry.step, {})
        layers = self._layers(entry)
        missing = [layer for layer in layers if layer not in launched]
        beyond = [layer for layer in launched if layer not in layers]
        if beyond:
            refuse("G-TRACE-CALL", "the pass is not of this layer", step=entry.step, layer=min(beyond))
        whole = not entry.failed and entry.step not in self._cut
        if whole and len(missing) > self._filtered.get(entry.step, 0):
            text = "the layer has no call in this pass, and no filter left it out"
            refuse("G-TRACE-CALL", text, step=entry.step, layer=missing[0])
        for call in (call for calls in launched.values() for call in calls):
            _check_rows(self._planned[entry.step], call)
            self.calls += 1
        if not entry.failed:
            self.assumed += len(missing)

    def _launch(self, entry: Pass, layer: int, calls: list[Launch]) -> None:
        """One layer of a pass: what its calls read, and where a filter left them out, what is there.

        The processes of a tensor-parallel group have a call each; all of them are held to the same rows.
        """
        held: dict[str, Mapping[KVFamily, Held]] = {}
        for call in calls:
            for name, families in call.held.items():
                if held.setdefault(name, families) != families:
                    place = {"step": entry.step, "layer": layer, "request": name}
                    refuse("G-TRACE-CALL", "two calls of the layer read other rows", **place)
        scales = self._memory.generation(layer, calls, self.ledger.scale_generation)
        spans = tuple(self._span(rows, layer, held.get(rows.request), scales) for rows in entry.rows)
        like = calls[0] if calls else self._pattern[layer]
        kernel = like.kernel if layer in entry.owing else ""
        event = Attend(layer, spans, entry.model_version, like.window, kernel=kernel)
        self.ledger = transition(self.ledger, event)
        if kernel:
            self._gradients.owe(entry.step, layer, self.ledger.epoch)

    def _span(
        self, rows: PassRows, layer: int, held: Mapping[KVFamily, Held] | None, scales: int | None
    ) -> Span:
        if held is None:
            families = next(iter(self._pattern[layer].held.values()))
            reads = tuple(self._assume(rows, layer, family) for family in families)
        else:
            reads = tuple(
                _read(
                    rows, layer, family, kv if self._memory.placed(layer) else replace(kv, pages=None), scales
                )
                for family, kv in held.items()
            )
        return Span(rows.request, rows.first, rows.end, rows.mode, reads)

    def _assume(self, rows: PassRows, layer: int, family: KVFamily) -> Read:
        """What a launch that was not recorded read: the rows that are there."""
        request = self.ledger.requests.get(rows.request)
        stream = None if request is None else request.streams.get((layer, family))
        fresh = stream is None or stream.rows is Kept.LOST or rows.first == 0
        return Read(family, rows.cache_version, 0 if fresh or stream is None else stream.first)


class CallMemory:
    """Where the rows of a trace's calls lie, and by which scales: layers of which every pass says so.

    Args:
        launches: by step and layer.
        steps: of the passes.
    """

    def __init__(self, launches: Mapping[int, Mapping[int, list[Launch]]], steps: set[int]) -> None:
        placed: dict[int, set[int]] = defaultdict(set)
        for step, layers in launches.items():
            for layer, calls in layers.items():
                if calls and all(call.placed for call in calls):
                    placed[layer].add(step)
        self._placed = {layer for layer, found in placed.items() if steps <= found}
        self._scales: dict[int, tuple[Scale, int]] = {}

    def placed(self, layer: int) -> bool:
        """Whether the pages of a layer's rows are known in all passes."""
        return layer in self._placed

    def generation(self, layer: int, calls: list[Launch], force: int) -> int | None:
        """Return the generation of the scales of a launch; None where it has none.

        A trace has the scales themselves. They are those in force until they change; a change that no event
        told of is a generation that was never in force.
        """
        scale = calls[0].scale if calls and layer in self._placed else None
        if scale is None:
            return None
        known, of = self._scales.get(layer, (scale, force))
        generation = force if known == scale or of != force else force + 1
        self._scales[layer] = scale, generation
        return generation


def _read(rows: PassRows, layer: int, family: KVFamily, held: Held, scales: int | None) -> Read:
    count = rows.end // family.ratio
    if held.end < count:
        place = {"request": rows.request, "layer": layer, "family": family.value, "position": rows.first}
        refuse("G-KV-MISSING", f"the call has the rows before {held.end}, and the request {count}", **place)
    scaled = None
    if scales is not None and held.pages is not None:
        size = held.pages.rows
        scaled = Scales(size, (scales,) * blocks(count, size))
    return Read(family, held.cache_version, held.first, scaled, held.pages)


def _check_rows(planned: Mapping[str, PassRows], call: Launch) -> None:
    """The rows of a call are rows of its step."""
    for number, key in enumerate(call.rows.requests):
        rows = planned.get(str(key))
        place = {"step": call.step, "layer": call.layer, "request": str(key)}
        if rows is None:
            refuse("G-TRACE-CALL", "the pass does not have the request", **place)
        positions = call.rows.positions[call.rows.request == number]
        outside = positions[(positions < rows.first) | (positions >= rows.end)]
        if outside.size:
            text = f"the pass computes [{rows.first}, {rows.end})"
            refuse("G-TRACE-CALL", text, **place, position=int(outside[0]))
