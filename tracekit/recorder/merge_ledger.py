"""One ledger out of those of a job's processes: what is missing of any of them is missing of the whole."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tracekit.errors import InvalidCall
from tracekit.model import Share, StepRecord, Tag

Place = tuple[Tag, int]


@dataclass(frozen=True, eq=False)
class Lines:
    """The ledger of one process, and what the merge makes of its calls.

    Args:
        share: its place in the job.
        ledger: its lines.
        whole: the step of each call of its group that every process of the group has.
        partial: steps in which it has calls that another process of its group has not.
        absent: tensor-parallel numbers of its group of which there is no trace.
    """

    share: Share
    ledger: Sequence[StepRecord]
    whole: Sequence[int]
    partial: Sequence[int]
    absent: Sequence[int]


def merged_ledger(processes: list[Lines], lost: Mapping[int, str]) -> tuple[StepRecord, ...]:
    """Return one line a step: the processes of a group speak of the same calls, those of others of more.

    Args:
        processes: every process of the job that left a trace.
        lost: the ranks that left none, with the reason.

    Raises:
        InvalidCall: `R-MERGE-LEDGER` when processes of one group expected or filtered different numbers of
            calls in one step.
    """
    if not all(process.ledger for process in processes):
        return ()
    groups: dict[int, list[Lines]] = {}
    for process in processes:
        groups.setdefault(process.share.data, []).append(process)
    lines: dict[Place, StepRecord] = {}
    for data in sorted(groups):
        for place, line in _of_group(groups[data]).items():
            lines[place] = _sum(lines[place], line) if place in lines else line
    known = {process.share.rank for process in processes}
    world = processes[0].share.world
    missing = {rank: "it left no trace" for rank in range(world) if rank not in known} | dict(lost)
    reasons = [f"rank {rank} is missing: {why}" for rank, why in sorted(missing.items())]
    ordered = sorted(lines, key=lambda place: (place[0] is Tag.NORMAL, place[0].value, place[1]))
    return tuple(_cut(lines[place], reasons) for place in ordered)


def _of_group(processes: list[Lines]) -> dict[Place, StepRecord]:
    """The lines of processes that ran the same steps. Those with other layers of the same heads add up."""
    cells: dict[int, dict[Place, StepRecord]] = {}
    for process in processes:
        cell = cells.setdefault(process.share.tensor, {})
        for line in process.ledger:
            place = line.tag, line.step
            told = _cut(line, [], f"rank {process.share.rank}: " if line.cut else "")
            cell[place] = _sum(cell[place], told) if place in cell else told
    whole = Counter(processes[0].whole)
    found: dict[Place, StepRecord] = {}
    for place in {place for cell in cells.values() for place in cell}:
        lines = {number: cell[place] for number, cell in cells.items() if place in cell}
        reasons = [line.cut for _, line in sorted(lines.items()) if line.cut]
        reasons += [f"tensor-parallel process {n} has no line of the step" for n in cells if n not in lines]
        reasons += [f"tensor-parallel process {n} left no trace" for n in processes[0].absent]
        if place[0] is Tag.NORMAL and any(place[1] in process.partial for process in processes):
            reasons.append("calls that not every tensor-parallel process has are left out")
        found[place] = _join(place, list(lines.values()), whole[place[1]], reasons)
    return found


def _join(place: Place, lines: list[StepRecord], whole: int, reasons: list[str]) -> StepRecord:
    first = lines[0]
    for line in lines:
        if (line.expected, line.filtered) != (first.expected, first.filtered):
            raise InvalidCall(
                f"processes with other heads of the same calls expected {first.expected} and {line.expected} "
                f"hooks of {place[0]} step {place[1]}, and filtered {first.filtered} and {line.filtered}; "
                "they are no parts of one run, and nothing is merged.",
                rule="R-MERGE-LEDGER",
                step=place[1],
            )
    return StepRecord(
        place[1],
        first.expected,
        min(line.fired for line in lines),
        whole if place[0] is Tag.NORMAL else 0,
        first.filtered,
        "; ".join(dict.fromkeys(reasons)),
        place[0],
        sum(line.wanted for line in lines),
        sum(line.written for line in lines),
        max(line.left_out for line in lines),
    )


def _sum(a: StepRecord, b: StepRecord) -> StepRecord:
    """One line of two processes that ran different calls of one step."""
    return StepRecord(
        a.step,
        a.expected + b.expected,
        a.fired + b.fired,
        a.recorded + b.recorded,
        a.filtered + b.filtered,
        "; ".join(filter(None, [a.cut, b.cut])),
        a.tag,
        a.wanted + b.wanted,
        a.written + b.written,
        a.left_out + b.left_out,
    )


def _cut(line: StepRecord, reasons: list[str], prefix: str = "") -> StepRecord:
    if line.tag is not Tag.NORMAL:
        return line
    texts = [prefix + line.cut if line.cut else "", *reasons]
    fields = {name: getattr(line, name) for name in StepRecord.__dataclass_fields__}
    return StepRecord(**{**fields, "cut": "; ".join(filter(None, texts))})
