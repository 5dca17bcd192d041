"""From a call to its event: which rows of which requests, and what they read."""

from collections.abc import Mapping
from operator import index
from typing import NamedTuple

import numpy as np

from tracekit.gate.refusal import refuse
from tracekit.model import AttentionCall, KVFamily, Mode, RequestKey, Rows
from tracekit.model.events import Attend, GateMode, GraphUse, Pages, Read, Scales, Span

_MODES = {
    Mode.TRAINING: GateMode.TRAINING,
    Mode.PREFILL: GateMode.PREFILL,
    Mode.DECODE: GateMode.EAGER,
    Mode.RECOMPUTE: GateMode.RECOMPUTE,
}


class Slots(NamedTuple):
    """Scales and pages of the rows of one request and family, where the engine has any."""

    scales: Scales | None = None
    pages: Pages | None = None


SlotMap = Mapping[tuple[RequestKey, KVFamily], Slots]
Extent = tuple[RequestKey, str, int, int]
"""A request of a launch, its name, and the positions `first .. end - 1` of its rows."""

_NOWHERE: SlotMap = {}
_NO_SLOTS = Slots()


class Step:
    """The rows of a launch, and what the layers of a step share: as a rule they read the same rows of KV.

    Args:
        rows: of the launch; the other layers of the step have the same object.

    Raises:
        GateRefused: `G-ROWS-GAP`, `G-EMPTY`, as `extents`.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.extents = extents(rows)
        self._spans: dict[tuple[GateMode, tuple[KVFamily, ...]], tuple[Span, ...]] = {}

    def spans(self, call: AttentionCall, mode: GateMode, slots: SlotMap) -> tuple[Span, ...]:
        """Return the spans of a call of the step; those of another layer where it reads the same.

        Raises:
            GateRefused: `G-KV-MISSING` when a request brings fewer rows than it has.
        """
        shape = mode, tuple(call.selection.families)
        known = self._spans.get(shape)
        if known is not None and not slots and _read_again(known, call):
            return known
        spans = self._spans[shape] = tuple(
            Span(name, first, end, mode, _reads(call, key, name, first, end, slots))
            for key, name, first, end in self.extents
        )
        return spans


def _read_again(spans: tuple[Span, ...], call: AttentionCall) -> bool:
    """Whether a call reads the rows that the spans say; their requests are those of the call."""
    for (_, _, end, _, reads), key, (held, families) in zip(
        spans, call.rows.requests, call.kv.items(), strict=False
    ):
        if held is not key:
            families = call.kv[key]
        for family, version, first, scales, pages in reads:
            rows = families[family]
            if rows.first != first or rows.generation != version or scales or pages:
                return False
            if first + rows.keys.data.shape[0] < end // family.ratio:
                return False
    return True


def extents(rows: Rows) -> list[Extent]:
    """Return the rows of each request, in the order of the launch, however they are mixed.

    Raises:
        GateRefused: `G-ROWS-GAP` when they are not consecutive, `G-EMPTY` when a request has none.
    """
    count = len(rows.requests)
    if count == 1:
        positions, size = rows.positions, rows.positions.size
        first, last = (int(positions.min()), int(positions.max())) if size > 1 else (0, -1)
        if size == 1:
            first = last = int(positions[0])
        found = [(first, last + 1, size)]
    elif (
        count == rows.count
        and len(one := dict(zip(rows.request.tolist(), rows.positions.tolist(), strict=True))) == count
    ):
        found = [(one[at], one[at] + 1, 1) for at in range(count)]  # a decode: one row each
    else:
        order = np.argsort(rows.request, kind="stable")
        starts = np.searchsorted(rows.request[order], np.arange(count + 1))
        sizes = np.diff(starts)
        if not sizes.all():
            refuse(
                "G-EMPTY", "it has no row in its launch", request=str(rows.requests[int(np.argmin(sizes))])
            )
        held = rows.positions[order]
        lows = np.minimum.reduceat(held, starts[:-1]).tolist()
        highs = np.maximum.reduceat(held, starts[:-1]).tolist()
        found = [(lo, hi + 1, n) for lo, hi, n in zip(lows, highs, sizes.tolist(), strict=True)]
    spans = []
    for key, (first, end, size) in zip(rows.requests, found, strict=True):
        name = str(key)
        if end - first != size:
            refuse("G-ROWS-GAP", f"{size} rows in positions [{first}, {end})", request=name, position=first)
        spans.append((key, name, first, end))
    return spans


def attend_of(
    call: AttentionCall,
    step: Step,
    model_version: int,
    graph: GraphUse | None = None,
    slots: SlotMap = _NOWHERE,
    kernel: str = "",
) -> Attend:
    """Return the event of a call.

    Raises:
        GateRefused: `G-KV-MISSING` when a request brings fewer rows than it has.
    """
    mode = GateMode.GRAPH if graph is not None and call.mode is Mode.DECODE else _MODES[call.mode]
    spans = step.spans(call, mode, slots)
    return Attend(int(index(call.layer)), spans, model_version, call.conventions.window, graph, kernel)


def _reads(
    call: AttentionCall, key: RequestKey, name: str, first: int, end: int, slots: SlotMap
) -> tuple[Read, ...]:
    """What one request brings to a launch."""
    families = call.kv[key]
    reads = []
    for family in call.selection.families:
        rows = families[family]
        if rows.end < end // family.ratio:
            text = f"the launch brings the rows before {rows.end}, and the request has {end // family.ratio}"
            place = {"request": name, "layer": call.layer, "family": family.value, "position": first}
            refuse("G-KV-MISSING", text, **place)
        mine = slots.get((key, family), _NO_SLOTS) if slots else _NO_SLOTS
        reads.append(
            Read(family, int(index(rows.generation)), int(index(rows.first)), mine.scales, mine.pages)
        )
    return tuple(reads)
