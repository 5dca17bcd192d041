"""Two traces in logical coordinates: which tensor of which layer diverges first.

Layer by layer, in the order of the data: conventions, Q, keys, values, sink, selection as a set, selection
as an order, O, LSE. Requests are paired by their tokens and only rows that saw the same tokens count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from tracekit.compare.alignment import Pair, align
from tracekit.compare.bits import Comparison, compare_bits
from tracekit.compare.layer_view import LayerView
from tracekit.model import AttentionCall, Bits, Origin, Output, Recording, RequestKey, Rows
from tracekit.verdict import Compared, Differences, Exit, Place

EQUAL, DIFFERS, NOT_COMPARED, ABSENT = "equal", "differs", "not compared", "absent"
CONVENTIONS = ("scale", "causal", "window", "output_boundary")


class TraceLike(Protocol):
    """What a diff reads of a trace."""

    @property
    def recording(self) -> Recording:
        """Requests and model."""
        ...

    def __iter__(self) -> Iterator[AttentionCall]:
        """Yield the calls in recorded order."""
        ...


@dataclass(frozen=True)
class Part:
    """The comparison of one tensor of one layer over all pairs of requests."""

    layer: int
    tensor: str
    verdict: str
    reason: str = ""
    compared: Compared = field(default_factory=Compared)
    differences: Differences = field(default_factory=Differences)
    place: Place | None = None
    rank: int = 0


@dataclass(frozen=True)
class Diff:
    """What two traces have in common, and where they part.

    Args:
        pairs: requests that were compared.
        parts: one a layer and tensor, in the order of the data.
        notes: what was left out, and why.
    """

    pairs: tuple[Pair, ...]
    parts: tuple[Part, ...]
    notes: tuple[str, ...]

    @property
    def first(self) -> Part | None:
        """The first part that differs."""
        return next((part for part in self.parts if part.verdict == DIFFERS), None)

    @property
    def exit_code(self) -> int:
        """0 equal, 1 different, 3 where the output of some layer could not be compared."""
        if self.first is not None:
            return Exit.REFUTED
        outputs = [part.verdict == EQUAL for part in self.parts if part.tensor == "out"]
        return Exit.OK if outputs and all(outputs) else Exit.INCONCLUSIVE

    @property
    def summary(self) -> str:
        """One sentence."""
        if self.first is not None:
            return f"first divergence: {self.first.tensor} of layer {self.first.layer}"
        if self.exit_code == Exit.INCONCLUSIVE:
            return "no answer: the output of at least one layer could not be compared"
        rows = max((part.compared.rows for part in self.parts), default=0)
        return f"equal where both have rows: {rows:,} rows a layer"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        parts = [_part_record(part) for part in self.parts]
        first = next((told for told, part in zip(parts, self.parts, strict=True) if part is self.first), None)
        return {
            "pairs": [{"base": str(p.base), "target": str(p.target), "tokens": p.tokens} for p in self.pairs],
            "parts": parts,
            "first": first,
            "notes": list(self.notes),
            "summary": self.summary,
            "exit_code": self.exit_code,
        }


def compare_traces(base: TraceLike, target: TraceLike) -> Diff:
    """Compare two traces; reads every call of both once."""
    pairs = align(base.recording.requests, target.recording.requests)
    ours, theirs = LayerView.of_trace(base), LayerView.of_trace(target)
    notes = [
        f"only in {name}: layers {', '.join(_layer_name(*key) for key in sorted(some - other))}"
        for name, some, other in (("base", set(ours), set(theirs)), ("target", set(theirs), set(ours)))
        if some - other
    ]
    notes += _unpaired(pairs, base.recording, target.recording)
    parts: list[Part] = []
    # without a pair the traces speak of other requests, and unequal conventions would say nothing
    for layer, rank in sorted(set(ours) & set(theirs)) if pairs else ():
        found = _layer(layer, ours[layer, rank], theirs[layer, rank], pairs)
        parts += (replace(part, rank=rank) for part in found)
    return Diff(tuple(pairs), tuple(parts), tuple(notes))


def _layer(layer: int, ours: LayerView, theirs: LayerView, pairs: Sequence[Pair]) -> Iterator[Part]:
    yield _conventions(layer, ours, theirs)
    yield _rows(layer, "q", ours, theirs, pairs)
    for name in ("keys", "values"):
        yield _kv(layer, name, ours, theirs, pairs)
    yield _sink(layer, ours, theirs)
    for name in ("selection set", "selection order"):
        yield _selection(layer, name, ours, theirs, pairs)
    for name in ("out", "lse"):
        yield _rows(layer, name, ours, theirs, pairs)


def _conventions(layer: int, ours: LayerView, theirs: LayerView) -> Part:
    mine, other = ours.any_call.conventions, theirs.any_call.conventions
    unequal = [
        f"{name} {getattr(mine, name)} against {getattr(other, name)}"
        for name in CONVENTIONS
        if getattr(mine, name) != getattr(other, name)
    ]
    compared = Compared(1, len(CONVENTIONS), 1)
    return Part(layer, "conventions", DIFFERS if unequal else EQUAL, "; ".join(unequal), compared)


def _rows(layer: int, name: str, ours: LayerView, theirs: LayerView, pairs: Sequence[Pair]) -> Part:
    """Q, O or LSE of every row that both traces have."""
    total = _Total()
    for pair in pairs:
        positions = ours.common(pair.base, theirs, pair.target, pair.tokens)
        if not positions:
            continue
        base = [_tensor(name, *ours.rows[pair.base][p]) for p in positions]
        target = [_tensor(name, *theirs.rows[pair.target][p]) for p in positions]
        missing = next((one for one in (*base, *target) if isinstance(one, str)), None)
        if missing is not None:
            total.left_out = total.left_out or missing
        else:
            total.add(layer, name, _stack(base), _stack(target), _positions(pair.base, positions))
    return total.part(layer, name)


def _kv(layer: int, name: str, ours: LayerView, theirs: LayerView, pairs: Sequence[Pair]) -> Part:
    """Keys or values that each common row was given: those of its own launch in either trace.

    Each pair of launches is compared once: a cache row that was overwritten between two steps is seen.
    """
    total = _Total()
    for pair in pairs:
        launches = {}
        for position in ours.common(pair.base, theirs, pair.target, pair.tokens):
            mine, other = ours.rows[pair.base][position][0], theirs.rows[pair.target][position][0]
            launches[id(mine), id(other)] = mine.kv[pair.base], other.kv[pair.target]
        for mine_kv, other_kv in launches.values():
            for family in sorted(set(mine_kv) & set(other_kv)):
                first = max(mine_kv[family].first, other_kv[family].first)
                end = min(mine_kv[family].end, other_kv[family].end, family.visible(pair.tokens - 1))
                if end <= first:
                    continue
                base, target = (
                    held.keys if name == "keys" else held.value_bits
                    for held in (kv[family].window(first, end) for kv in (mine_kv, other_kv))
                )
                total.add(layer, name, base, target, _positions(pair.base, range(first, end)))
    return total.part(layer, name)


def _sink(layer: int, ours: LayerView, theirs: LayerView) -> Part:
    mine, other = ours.any_call.sink, theirs.any_call.sink
    if mine is None and other is None:
        return Part(layer, "sink", ABSENT)
    if mine is None or other is None:
        return Part(layer, "sink", DIFFERS, "only one trace has a sink")
    total = _Total()
    base, target = (Bits(sink.data[None], sink.dtype) for sink in (mine, other))
    total.add(layer, "sink", base, target, _positions(ours.any_call.rows.requests[0], [0]))
    return total.part(layer, "sink")


def _selection(layer: int, name: str, ours: LayerView, theirs: LayerView, pairs: Sequence[Pair]) -> Part:
    """The keys of each row, as a set or in executed order."""
    rows = elements = differing = 0
    place: Place | None = None
    for pair in pairs:
        for position in ours.common(pair.base, theirs, pair.target, pair.tokens):
            base, target = ours.keys_of(pair.base, position), theirs.keys_of(pair.target, position)
            if name == "selection set":
                base, target = sorted(base), sorted(target)
            rows, elements = rows + 1, elements + len(base)
            if base != target:
                differing += 1
                place = place or _key_place(layer, name, pair.base, position, base, target)
    if not rows:
        return Part(layer, name, NOT_COMPARED, "no common row")
    verdict = DIFFERS if differing else EQUAL
    compared = Compared(1, elements, rows)
    return Part(layer, name, verdict, "", compared, Differences(differing, differing), place)


Keys = list[tuple[str, int]]


def _key_place(layer: int, name: str, key: RequestKey, position: int, base: Keys, target: Keys) -> Place:
    """The first entry of the two lists that differs."""
    at = next(
        (i for i, (a, b) in enumerate(zip(base, target, strict=False)) if a != b), min(len(base), len(target))
    )
    ours, theirs = (
        (f"{one[at][0]} {one[at][1]}", one[at][1]) if at < len(one) else ("none", -1)
        for one in (base, target)
    )
    return Place(str(key), position, layer, 0, at, name, ours[0], theirs[0], float(ours[1]), float(theirs[1]))


def _tensor(name: str, call: AttentionCall, t: int) -> Bits | str:
    """One row of a tensor, or why there is none to compare."""
    if name == "q":
        return call.q.part(slice(t, t + 1))
    output: Output | None = call.out if name == "out" else call.lse
    if output is None:
        return f"{name} was not recorded"
    if output.origin is not Origin.EXECUTED:
        return f"{name} is derived by tracekit, not executed by a kernel"
    return output.bits.part(slice(t, t + 1))


def _stack(parts: Sequence[Bits | str]) -> Bits:
    bits = [part for part in parts if isinstance(part, Bits)]
    return Bits(np.concatenate([part.data for part in bits]), bits[0].dtype)


def _positions(key: RequestKey, positions: Sequence[int]) -> Rows:
    count = len(positions)
    return Rows(
        (key,), np.zeros(count, np.int32), np.array(positions, np.int64), np.full(count, -1, np.int64)
    )


@dataclass
class _Total:
    """The comparison of one tensor so far: what was compared, what cannot be, what was left out."""

    found: Comparison = field(default_factory=Comparison)
    unlike: str = ""
    left_out: str = ""

    def add(self, layer: int, name: str, base: Bits, target: Bits, rows: Rows) -> None:
        """Compare one part; another dtype or shape is a difference, not a gap."""
        if base.dtype != target.dtype or base.shape != target.shape:
            self.unlike = self.unlike or f"{base} against {target}"
        else:
            self.found += compare_bits({name: (base, target)}, rows, layer)

    def part(self, layer: int, name: str) -> Part:
        """Return the verdict: a difference is never hidden by what was left out."""
        found = self.found
        if self.unlike or not found.same:
            verdict, reason = DIFFERS, self.unlike
        elif self.left_out or not found.compared.elements:
            verdict, reason = NOT_COMPARED, self.left_out or "no common row"
        else:
            verdict, reason = EQUAL, ""
        return Part(layer, name, verdict, reason, found.compared, found.differences, found.first)


def _layer_name(layer: int, rank: int) -> str:
    return f"{layer} of rank {rank}" if rank else str(layer)


def _unpaired(pairs: Sequence[Pair], base: Recording, target: Recording) -> Iterator[str]:
    for name, recording, taken in (
        ("base", base, {pair.base for pair in pairs}),
        ("target", target, {pair.target for pair in pairs}),
    ):
        alone = [str(request.key) for request in recording.requests if request.key not in taken]
        if alone:
            yield f"only in {name}: requests {', '.join(alone)}"


def _part_record(part: Part) -> dict[str, Any]:
    return {
        **asdict(part),
        "differences": {**asdict(part.differences), "ulps": dict(part.differences.ulps)},
        "place": None if part.place is None else part.place.to_dict(),
    }
