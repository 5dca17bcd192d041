"""What replay needs of a trace, and which of its calls the user selected."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tracekit.errors import NothingSelected, UsageError
from tracekit.model import AttentionCall, Recording, RequestKey, StepRecord, Tag


class Head(Protocol):
    """What is known of a call before it is read."""

    @property
    def index(self) -> int:
        """The number of the call in its trace."""
        ...

    @property
    def layer(self) -> int:
        """0-based layer."""
        ...

    @property
    def step(self) -> int:
        """0-based engine step."""
        ...

    @property
    def requests(self) -> Sequence[RequestKey]:
        """The requests of the call."""
        ...


class TraceLike(Protocol):
    """A trace in a file or in memory."""

    @property
    def heads(self) -> Sequence[Any]:
        """One `Head` a call, in the order of the trace."""
        ...

    @property
    def recording(self) -> Recording:
        """Requests and ledger."""
        ...

    def call(self, index: int) -> AttentionCall:
        """Read one call."""
        ...


def name_of(trace: TraceLike) -> str:
    """Return the path of a trace, or the name that it gives itself."""
    return str(getattr(trace, "path", None) or getattr(trace, "name", None) or "trace")


def select(
    trace: TraceLike,
    layers: Iterable[int] | None = None,
    requests: Iterable[str] | None = None,
    calls: Iterable[int] | None = None,
) -> list[int]:
    """Return the numbers of the selected calls, in the order of the trace.

    Args:
        trace: the trace.
        layers: keep calls of these layers.
        requests: keep calls that hold a row of these requests, by key, start of key, or engine alias.
        calls: keep these calls.

    Raises:
        NothingSelected: `V-SELECT`, with what there is to select from.
        UsageError: `V-SELECT`, a part of a filter matches nothing, though others do.
    """
    heads: Sequence[Head] = trace.heads
    wanted_layers = None if layers is None else set(layers)
    wanted_calls = None if calls is None else set(calls)
    named = None if requests is None else list(requests)
    keys = None if named is None else _keys(trace, named)
    chosen = [
        head.index
        for head in heads
        if (wanted_layers is None or head.layer in wanted_layers)
        and (wanted_calls is None or head.index in wanted_calls)
        and (keys is None or keys & set(head.requests))
    ]
    if not chosen:
        there = sorted({head.layer for head in heads})
        asked = [
            f"{name} {spans(sorted(wanted))}"
            for name, wanted in (("layers", wanted_layers), ("calls", wanted_calls))
            if wanted is not None
        ]
        if named is not None:
            asked.append(f"requests {', '.join(named)}")
        raise NothingSelected(
            f"{name_of(trace)}: {' and '.join(asked) or 'an empty trace'} leaves none of {len(heads)} calls; "
            "the trace holds "
            f"layers {spans(there)}, calls {spans(sorted(head.index for head in heads))} and requests "
            f"{', '.join(str(request.key) for request in trace.recording.requests) or 'unnamed'}.",
            rule="V-SELECT",
            layers=there,
            calls=len(heads),
            requests=[str(request.key) for request in trace.recording.requests],
        )
    absent = [
        f"{name} {spans(sorted(gone))}"
        for name, gone in (
            ("layers", (wanted_layers or set()) - {head.layer for head in heads}),
            ("calls", (wanted_calls or set()) - {head.index for head in heads}),
        )
        if gone
    ]
    if unknown := [name for name in named or () if not _keys(trace, [name])]:
        absent.append(f"requests {', '.join(unknown)}")
    if absent:
        raise UsageError(
            f"{name_of(trace)} has no {' and no '.join(absent)}; take out of the filter what is not there.",
            rule="V-SELECT",
            absent=absent,
        )
    return chosen


def incomplete(trace: TraceLike, selected: Sequence[int]) -> str:
    """Return why the capture is incomplete, or an empty text.

    The ledger is what says that nothing is missing, so each step of a selected call needs a line, and the
    line must count as many calls as the trace holds of the step. With nothing filtered away every line
    counts, because a step may have lost all of its calls.
    """
    if not trace.recording.ledger:
        return "the trace has no capture ledger"
    chosen = set(selected)
    held = Counter(head.step for head in trace.heads)
    steps = {head.step for head in trace.heads if head.index in chosen}
    lines = {line.step: line for line in trace.recording.ledger if line.tag is Tag.NORMAL}
    if len(selected) == len(trace.heads):
        steps |= set(lines)
    cut = {step: why for step in sorted(steps) if (why := _cut(lines.get(step), held[step]))}
    if not cut:
        return ""
    step, why = next(iter(cut.items()))
    more = f" (and {len(cut) - 1} more steps)" if len(cut) > 1 else ""
    return f"the capture is cut at step {step}{more}: {why}"


def _cut(line: StepRecord | None, held: int) -> str:
    """Why a step is incomplete, of which the trace holds so many calls; empty where it is whole."""
    if line is None:
        return "its ledger has no line for the step"
    if not line.complete:
        counted = f"{line.expected} hooks expected, {line.fired} fired, {line.recorded} calls recorded"
        return line.cut or counted
    if line.recorded != held:
        return f"its ledger says {line.recorded} calls recorded, the trace holds {held}"
    return ""


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as `0-3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def _keys(trace: TraceLike, wanted: list[str]) -> set[RequestKey]:
    known = {key for head in trace.heads for key in head.requests}
    alias = {request.alias: request.key for request in trace.recording.requests if request.alias}
    return {key for key in known for name in wanted if str(key).startswith(name) or alias.get(name) == key}
