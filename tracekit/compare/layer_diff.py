"""One layer of two traces, tensor by tensor, in the order of the data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from tracekit.compare.alignment import Pair
from tracekit.compare.bits import Comparison, compare_bits
from tracekit.compare.layer_view import LayerView, Match, keys_of
from tracekit.model import AttentionCall, Bits, Origin, Output, RequestKey, Rows
from tracekit.verdict import Compared, Differences, Place

EQUAL, DIFFERS, NOT_COMPARED, ABSENT = "equal", "differs", "not compared", "absent"
CONVENTIONS = ("scale", "causal", "window", "output_boundary")


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


def layer_parts(layer: int, ours: LayerView, theirs: LayerView, pairs: Sequence[Pair]) -> Iterator[Part]:
    """Yield conventions, Q, keys, values, sink, selection as a set and as an order, O, LSE."""
    matches = [(pair, ours.matches(pair.base, theirs, pair.target, pair.tokens)) for pair in pairs]
    launches = launches_of(matches)
    yield _conventions(layer, launches)
    yield row_part(layer, "q", matches)
    for name in ("keys", "values"):
        yield _kv(layer, name, launches)
    yield _sink(layer, launches)
    for name in ("selection set", "selection order"):
        yield _selection(layer, name, matches)
    for name in ("out", "lse"):
        yield row_part(layer, name, matches)


Matches = Sequence[tuple[Pair, list[Match]]]


@dataclass(frozen=True, eq=False)
class Launches:
    """Two calls that answered at least one common row of a pair of requests."""

    pair: Pair
    base: AttentionCall
    target: AttentionCall


def launches_of(matches: Matches) -> list[Launches]:
    """Each pair of calls once: what belongs to a launch is compared for every launch, and only once."""
    found: dict[tuple[Pair, int, int], Launches] = {}
    for pair, rows in matches:
        for row in rows:
            base, target = row.base[0], row.target[0]
            found.setdefault((pair, id(base), id(target)), Launches(pair, base, target))
    return list(found.values())


def _conventions(layer: int, launches: Sequence[Launches]) -> Part:
    unequal = [
        f"{name} {getattr(launch.base.conventions, name)} against {getattr(launch.target.conventions, name)}"
        for launch in launches
        for name in CONVENTIONS
        if getattr(launch.base.conventions, name) != getattr(launch.target.conventions, name)
    ]
    if not launches:
        return Part(layer, "conventions", NOT_COMPARED, "no common row")
    compared = Compared(len(launches), len(launches) * len(CONVENTIONS), len(launches))
    return Part(
        layer, "conventions", DIFFERS if unequal else EQUAL, "; ".join(dict.fromkeys(unequal)), compared
    )


def row_part(layer: int, name: str, matches: Matches) -> Part:
    """Q, O or LSE of every row that both traces have."""
    total = Total()
    for pair, rows in matches:
        both = [(row.position, _tensor(name, *row.base), _tensor(name, *row.target)) for row in rows]
        for _, *sides in both:
            total.leave_out(next((side for side in sides if isinstance(side, str)), ""))
        kept = [(p, a, b) for p, a, b in both if isinstance(a, Bits) and isinstance(b, Bits)]
        for group in _alike(kept):
            positions, base, target = zip(*group, strict=True)
            total.add(layer, name, _stack(base), _stack(target), pair.base, positions)
    return total.part(layer, name)


def _alike(rows: list[tuple[int, Bits, Bits]]) -> Iterator[list[tuple[int, Bits, Bits]]]:
    """Rows in runs that can be stacked: calls of one layer may differ in dtype and heads."""
    for _, run in groupby(rows, key=lambda row: [(side.dtype, side.shape) for side in row[1:]]):
        yield list(run)


def _kv(layer: int, name: str, launches: Sequence[Launches]) -> Part:
    """Keys or values that common rows were given: those of their own launch in either trace.

    Each pair of launches is compared: a cache row that was overwritten between two steps is seen.
    """
    total = Total()
    for launch in launches:
        pair, mine, other = (
            launch.pair,
            launch.base.kv[launch.pair.base],
            launch.target.kv[launch.pair.target],
        )
        for family in sorted(set(mine) & set(other)):
            first = max(mine[family].first, other[family].first)
            end = min(mine[family].end, other[family].end, family.visible(pair.tokens - 1))
            if end <= first:
                continue
            base, target = (
                held.keys if name == "keys" else held.value_bits
                for held in (kv[family].window(first, end) for kv in (mine, other))
            )
            total.add(layer, name, base, target, pair.base, range(first, end))
    return total.part(layer, name)


def _sink(layer: int, launches: Sequence[Launches]) -> Part:
    total = Total()
    for launch in launches:
        mine, other = launch.base.sink, launch.target.sink
        if mine is not None and other is not None:
            base, target = (Bits(sink.data[None], sink.dtype) for sink in (mine, other))
            total.add(layer, "sink", base, target, launch.pair.base, [0])
        elif mine is not other:
            total.unlike = total.unlike or "only one trace has a sink"
    if launches and not total.unlike and not total.found.compared.elements:
        return Part(layer, "sink", ABSENT)
    return total.part(layer, "sink")


def _selection(layer: int, name: str, matches: Matches) -> Part:
    """The keys of each row, as a set or in executed order."""
    rows = elements = differing = 0
    place: Place | None = None
    for pair, found in matches:
        for row in found:
            base, target = keys_of(row.base), keys_of(row.target)
            if name == "selection set":
                base, target = sorted(base), sorted(target)
            rows, elements = rows + 1, elements + len(base)
            if base != target:
                differing += 1
                place = place or _key_place(name, layer, pair.base, row.position, base, target)
    if not rows:
        return Part(layer, name, NOT_COMPARED, "no common row")
    verdict = DIFFERS if differing else EQUAL
    compared = Compared(1, elements, rows) if elements else Compared()
    return Part(layer, name, verdict, "", compared, Differences(differing, differing), place)


Keys = list[tuple[str, int]]


def _key_place(name: str, layer: int, key: RequestKey, position: int, base: Keys, target: Keys) -> Place:
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
    if name in ("d_out", "d_q"):
        gradient: Bits | None = getattr(call.grads, name, None)
        return f"{name} was not recorded" if gradient is None else gradient.part(slice(t, t + 1))
    output: Output | None = call.out if name == "out" else call.lse
    if output is None:
        return f"{name} was not recorded"
    if output.origin is not Origin.EXECUTED:
        return f"{name} is derived by tracekit, not executed by a kernel"
    return output.bits.part(slice(t, t + 1))


def _stack(parts: Sequence[Bits | str]) -> Bits:
    bits = [part for part in parts if isinstance(part, Bits)]
    return Bits(np.concatenate([part.data for part in bits]), bits[0].dtype)


def _distinct(positions: Sequence[int]) -> Iterator[range]:
    """Runs of rising positions: a row that was computed twice stands in two of them."""
    start = 0
    for at in range(1, len(positions) + 1):
        if at == len(positions) or positions[at] <= positions[at - 1]:
            yield range(start, at)
            start = at


def _positions(key: RequestKey, positions: Sequence[int]) -> Rows:
    count = len(positions)
    return Rows(
        (key,), np.zeros(count, np.int32), np.array(positions, np.int64), np.full(count, -1, np.int64)
    )


@dataclass
class Total:
    """The comparison of one tensor so far: what was compared, what cannot be, what was left out."""

    found: Comparison = field(default_factory=Comparison)
    unlike: str = ""
    left_out: str = ""

    def leave_out(self, reason: str) -> None:
        """Note why some row cannot be compared."""
        self.left_out = self.left_out or reason

    def add(
        self, layer: int, name: str, base: Bits, target: Bits, key: RequestKey, positions: Sequence[int]
    ) -> None:
        """Compare one part; another dtype or shape is a difference, not a gap."""
        if base.dtype != target.dtype or base.shape != target.shape:
            self.unlike = self.unlike or f"{base} against {target}"
            return
        for run in _distinct(positions):
            part = slice(run.start, run.stop)
            pair = {name: (base.part(part), target.part(part))}
            self.found += compare_bits(pair, _positions(key, positions[part]), layer)

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
