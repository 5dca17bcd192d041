"""Merge the traces of the processes of one job into one, in logical words.

Data-parallel processes bring other requests: their calls stand side by side. Tensor-parallel processes bring
other heads of the same calls: these are put together. Processes with the same place in the job are replicas,
and must say the same bits, or hold other layers. What contradicts itself is refused by name. The order in
which the traces are given does not matter, and what a process lost is in the ledger.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path

from tracekit.errors import NothingSelected, UsageError
from tracekit.model import AttentionCall, Identity, IndexerCall, Recording, Request, RequestKey
from tracekit.model.history import Entry, Unproven
from tracekit.recorder.merge_calls import joined, joined_indexer, renamed, renamed_indexer
from tracekit.recorder.merge_ledger import Lines, merged_ledger
from tracekit.recorder.merge_places import Group, Part, grouped, placed, refuse, refuse_twice
from tracekit.store import TraceSummary, open_trace, write_trace
from tracekit.store.target import check_target

Progress = Callable[[int, int, str], None]
Names = Mapping[RequestKey, RequestKey]


def merge(
    ranks: Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    *,
    force: bool = False,
    lost: Mapping[int, str] | None = None,
    apart: bool = False,
    progress: Progress | None = None,
) -> TraceSummary:
    """Merge the traces of a job's processes.

    The merged trace has the content digest of one process that had done it all, where the arithmetic is the
    same. Launch plans of tensor-parallel processes are left out: a plan is about one process.

    Args:
        ranks: their traces, in any order.
        out: the trace to write.
        force: write over a file that exists.
        lost: processes that left no trace, by rank, with the reason; the ledger says so.
        apart: traces that do not say which rank they are come from processes with requests of their own,
            although the prompts may be equal.
        progress: called with (done, total, text) after each call.

    Returns:
        What was written.

    Raises:
        UsageError: `U-MERGE` there is nothing to merge, or a trace is given twice; `U-EXISTS`, `U-FOLDER` for
            the path.
        InvalidCall: `R-MERGE-SHARE`, `R-MERGE-REPLICA`, `R-MERGE-IDENTITY`, `R-MERGE-LEDGER`,
            `R-MERGE-TOKENS`, `R-MERGE-HEADS`, `R-MERGE-CALL`, `C-TP-COPIES`: they contradict each other.
        NothingSelected: `R-MERGE-WHOLE` no call is whole.
        TraceMissing, TraceUnreadable, TraceCorrupt, TraceTooNew: a trace cannot be read.
        TraceUnwritable: `F-KIND`, `F-WRITE`.
    """
    target = check_target(out, force=force)
    if not ranks:
        raise UsageError("there is nothing to merge; give the traces of the processes.", rule="U-MERGE")
    with ExitStack() as stack:
        traces = [stack.enter_context(open_trace(Path(path))) for path in ranks]
        if not apart:
            refuse_twice(traces)
        groups = grouped(placed(traces, apart))
        names = _names(groups)
        plans = [_matched(group) for group in groups]
        _refuse_nothing(plans)
        lines = [line for plan in plans for line in plan.lines]
        recording = Recording(
            _identity(groups),
            tuple(
                request
                for group, name in zip(groups, names, strict=True)
                for request in _requests(group, name)
            ),
            merged_ledger(lines, dict(lost or {})),
            _notes(groups),
            history=_history(groups),
        )
        order = sorted(
            (
                (step, number, place)
                for number, plan in enumerate(plans)
                for place, step in enumerate(plan.steps)
            ),
        )

        def calls() -> Iterator[AttentionCall]:
            for done, (_, number, place) in enumerate(order):
                yield plans[number].call(place, names[number])
                if progress is not None:
                    progress(done + 1, len(order), "calls")

        def indexer_calls() -> Iterator[IndexerCall]:
            for plan, name in zip(plans, names, strict=True):
                yield from plan.indexer_calls(name)

        return write_trace(target, recording, calls(), indexer_calls=indexer_calls())


def _names(groups: list[Group]) -> list[dict[RequestKey, RequestKey]]:
    """New keys by old ones: equal prompts of other groups are other requests, with ordinals of their own."""
    taken: dict[str, int] = {}
    names = []
    for group in groups:
        keys = {key for part in group.parts for head in part.trace.heads for key in head.requests}
        keys |= {request.key for part in group.parts for request in part.trace.recording.requests}
        keys |= {key for part in group.parts for head in part.trace.indexer_heads for key in head.requests}
        names.append({key: RequestKey(key.digest, key.ordinal + taken.get(key.digest, 0)) for key in keys})
        for key in names[-1].values():
            taken[key.digest] = max(taken.get(key.digest, 0), key.ordinal + 1)
    return names


def _requests(group: Group, names: Names) -> Iterator[Request]:
    """The requests of a group, each with the most tokens that a process has seen of it."""
    longest: dict[RequestKey, tuple[Request, Part]] = {}
    for part in group.parts:
        for request in part.trace.recording.requests:
            known, owner = longest.get(request.key, (request, part))
            count = min(known.token_ids.size, request.token_ids.size)
            if known.token_ids[:count].tolist() != request.token_ids[:count].tolist():
                raise refuse(
                    "R-MERGE-TOKENS", f"{owner.name} and {part.name} give request {request.key} other tokens"
                )
            if request.token_ids.size >= known.token_ids.size:
                known, owner = request, part
            longest[request.key] = known, owner
    for key, (request, _) in longest.items():
        yield replace(request, key=names[key])


@dataclass(frozen=True, eq=False)
class Plan:
    """Which calls of a group's processes belong together.

    Args:
        group: whose.
        lines: the ledger lines of each process.
        steps: the step of each whole call.
        places: for each whole call, where each process holds it: trace and index.
    """

    group: Group
    lines: list[Lines]
    steps: list[int]
    places: list[list[tuple[Part, int]]]

    def call(self, place: int, names: Names) -> AttentionCall:
        """Return a whole call."""
        shards = [(part.name, part.trace.call(index)) for part, index in self.places[place]]
        if len(shards) == 1:
            return renamed(shards[0][1], names)
        return renamed(joined(shards, self.places[place][0][0].share), names)

    def indexer_calls(self, names: Names) -> Iterator[IndexerCall]:
        """Yield the calls of indexers, which every process of a group runs whole."""
        if self.group.lost:
            return
        cells = [cell for _, cell in sorted(self.group.cells.items())]
        for number in range(len(cells[0])):
            traces = [cell[number] for cell in cells]
            counts = {len(part.trace.indexer_heads) for part in traces}
            if len(counts) > 1:
                raise refuse(
                    "R-MERGE-CALL", f"{traces[0].name} and its peers hold other numbers of indexer calls"
                )
            for index in range(counts.pop()):
                shards = [(part.name, part.trace.indexer_call(index)) for part in traces]
                yield renamed_indexer(joined_indexer(shards), names)


def _matched(group: Group) -> Plan:
    """Find the calls that every process of a group has."""
    Key = tuple[object, ...]  # noqa: N806 - a type
    found: dict[int, dict[Key, tuple[Part, int]]] = {}
    for number, cell in sorted(group.cells.items()):
        seen: dict[Key, tuple[Part, int]] = {}
        times: Counter[Key] = Counter()
        for part in cell:
            for head in part.trace.heads:
                key: Key = (head.step, head.layer, head.mode, head.requests, head.num_rows)
                seen[(*key, times[key])] = part, head.index
                times[key] += 1
        found[number] = seen
    whole = [key for key in next(iter(found.values())) if all(key in seen for seen in found.values())]
    if group.lost:
        whole = []
    lost = {
        number: sorted({int(str(key[0])) for key in set(seen) - set(whole)}) for number, seen in found.items()
    }
    steps = [int(str(key[0])) for key in whole]
    lines = [
        Lines(part.share, part.trace.recording.ledger, steps, lost[part.share.tensor], group.lost)
        for part in group.parts
    ]
    return Plan(group, lines, steps, [[found[number][key] for number in sorted(found)] for key in whole])


def _identity(groups: list[Group]) -> Identity:
    """The model of all parts. Processes with the same heads have the same weights, others parts of them."""
    parts = [part for group in groups for part in group.parts]
    first = parts[0].trace.recording.identity
    weights: dict[int, str] = {}
    layered = any(len(cell) > 1 for group in groups for cell in group.cells.values())
    for part in parts:
        identity = part.trace.recording.identity
        held = weights.setdefault(part.share.tensor, identity.weights_digest)
        other_weights = held != identity.weights_digest and not layered
        if replace(identity, weights_digest="") != replace(first, weights_digest="") or other_weights:
            raise refuse(
                "R-MERGE-IDENTITY",
                f"{parts[0].name} and {part.name} are of different models: {_unlike(first, identity)}",
            )
    digests = {part.trace.recording.identity.weights_digest for part in parts}
    return replace(first, weights_digest=digests.pop() if len(digests) == 1 else "")


def _unlike(one: Identity, other: Identity) -> str:
    """The first fields that tell two models apart, with both values."""
    unlike = [
        (field.name, *values)
        for field in fields(Identity)
        if len(set(values := tuple(getattr(identity, field.name) for identity in (one, other)))) > 1
    ]
    return " and ".join(f"{name} {first:.24} and {second:.24}" for name, first, second in unlike[:2])


def _refuse_nothing(plans: list[Plan]) -> None:
    if any(plan.steps for plan in plans):
        return
    lost = plans[0].group.lost
    who = (
        f"there is no trace of tensor-parallel number {', '.join(map(str, lost))}"
        if lost
        else "they share none"
    )
    raise NothingSelected(
        f"no call has all its heads: {who}; give the traces of all processes. Nothing is merged.",
        rule="R-MERGE-WHOLE",
    )


def _notes(groups: list[Group]) -> dict[str, str]:
    """The notes on which all agree, and which ranks were merged."""
    parts = [part for group in groups for part in group.parts]
    notes = [dict(part.trace.recording.notes) for part in parts]
    shared = {name: text for name, text in notes[0].items() if all(note.get(name) == text for note in notes)}
    ranks = ", ".join(str(rank) for rank in sorted({part.share.rank for part in parts}))
    return {**shared, "merged": f"ranks {ranks} of {parts[0].share.world}"}


def _history(groups: list[Group]) -> tuple[Entry, ...] | None:
    """The history that all processes tell, where they are one group; else why there is none."""
    parts = [part for group in groups for part in group.parts]
    told = [part.trace.recording.history for part in parts]
    if not any(told):
        return None
    if all(history == told[0] for history in told) and len(groups) == 1:
        return told[0]
    if len(groups) > 1:
        return (Unproven("each data-parallel process has a history of its own; ask the parts for theirs"),)
    silent = [part.name for part, history in zip(parts, told, strict=True) if not history]
    if silent:
        return (Unproven(f"{silent[0]} has none, and its peers have one"),)
    other = next(part.name for part, history in zip(parts, told, strict=True) if history != told[0])
    return (Unproven(f"{parts[0].name} and {other} tell different ones"),)
