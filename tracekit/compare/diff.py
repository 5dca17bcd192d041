"""Two traces in logical coordinates: which tensor of which layer diverges first.

Layer by layer, in the order of the data: conventions, Q, keys, values, sink, selection as a set, selection
as an order, O, LSE. Requests are paired by their tokens and only rows that saw the same tokens count.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from tracekit.compare.alignment import Pair, align
from tracekit.compare.gradient_diff import gradient_parts
from tracekit.compare.layer_diff import ABSENT, DIFFERS, EQUAL, Part, layer_parts
from tracekit.compare.layer_view import Layer, LayerView
from tracekit.model import AttentionCall, Recording, RequestKey, Tag
from tracekit.verdict import Exit


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
class Diff:
    """What two traces have in common, and where they part.

    Args:
        pairs: requests that were compared.
        parts: one a layer and tensor, in the order of the data.
        notes: what only one of them has, or what a trace lacks: nothing of that was compared.
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
        """0 equal, 1 different, 3 where some row, or the output of some layer, was not compared."""
        if self.first is not None:
            return Exit.REFUTED
        return Exit.OK if self._outputs_equal and not self.notes else Exit.INCONCLUSIVE

    @property
    def _outputs_equal(self) -> bool:
        outputs = [part.verdict == EQUAL for part in self.parts if part.tensor == "out"]
        gradients = [part.verdict in (EQUAL, ABSENT) for part in self.parts if part.tensor.startswith("d_")]
        return bool(outputs) and all(outputs) and all(gradients)

    @property
    def summary(self) -> str:
        """One sentence."""
        if self.first is not None:
            return f"first divergence: {self.first.tensor} of layer {self.first.layer}"
        if not self._outputs_equal:
            return "no answer: the output or a gradient of at least one layer could not be compared"
        rows = max((part.compared.rows for part in self.parts), default=0)
        if self.notes:
            return f"no answer: equal where both have rows ({rows:,} a layer), but not all was compared"
        return f"equal: {rows:,} rows a layer"

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


def compare_traces(base: TraceLike, target: TraceLike, names: tuple[str, str] = ("base", "target")) -> Diff:
    """Compare two traces; reads every call of both once.

    Args:
        base: the one.
        target: the other.
        names: what notes call them.
    """
    ours_name, theirs_name = names
    pairs = align(base.recording.requests, target.recording.requests)
    ours, theirs = LayerView.of_trace(base), LayerView.of_trace(target)
    notes = [
        f"only in {name}: layers {', '.join(_layer_name(*key) for key in sorted(some - other))}"
        for name, some, other in (
            (ours_name, set(ours), set(theirs)),
            (theirs_name, set(theirs), set(ours)),
        )
        if some - other
    ]
    notes += _unpaired(pairs, names, base.recording, target.recording)
    common = sorted(set(ours) & set(theirs)) if pairs else []
    notes += _alone(ours_name, [(key, _rows_alone(ours[key], theirs[key], pairs)) for key in common])
    turned = [Pair(pair.target, pair.base, pair.tokens) for pair in pairs]
    notes += _alone(theirs_name, [(key, _rows_alone(theirs[key], ours[key], turned)) for key in common])
    notes += _gradients_alone(ours_name, ours, theirs, common)
    notes += _gradients_alone(theirs_name, theirs, ours, common)
    notes += [*_cut(ours_name, base.recording), *_cut(theirs_name, target.recording)]
    parts: list[Part] = []
    # without a pair the traces speak of other requests, and unequal conventions would say nothing
    for layer, rank in common:
        views = layer, ours[layer, rank], theirs[layer, rank], pairs
        parts += (replace(part, rank=rank) for part in (*layer_parts(*views), *gradient_parts(*views)))
    return Diff(tuple(pairs), tuple(parts), tuple(notes))


def _layer_name(layer: int, rank: int) -> str:
    return f"{layer} of rank {rank}" if rank else str(layer)


def _unpaired(
    pairs: Sequence[Pair], names: tuple[str, str], base: Recording, target: Recording
) -> Iterator[str]:
    for name, recording, taken in (
        (names[0], base, {pair.base for pair in pairs}),
        (names[1], target, {pair.target for pair in pairs}),
    ):
        alone = [str(request.key) for request in recording.requests if request.key not in taken]
        if alone:
            yield f"only in {name}: requests {', '.join(alone)}"


def _rows_alone(ours: LayerView, theirs: LayerView, pairs: Sequence[Pair]) -> list[tuple[RequestKey, int]]:
    """The rows of paired requests that the other trace has not computed over the same tokens."""
    return [
        (pair.base, position)
        for pair in pairs
        for position in sorted(ours.rows.get(pair.base, {}))
        if position >= pair.tokens or position not in theirs.rows.get(pair.target, {})
    ]


def _alone(name: str, rows: list[tuple[Layer, list[tuple[RequestKey, int]]]]) -> Iterator[str]:
    count = sum(len(found) for _, found in rows)
    if count:
        layer, (request, position) = next((layer, found[0]) for layer, found in rows if found)
        yield (
            f"only in {name}: {count:,} rows, the first at position {position} of {request} in layer "
            f"{_layer_name(*layer)}; the other trace has none there over the same tokens"
        )


def _gradients_alone(
    name: str, ours: Mapping[Layer, LayerView], theirs: Mapping[Layer, LayerView], common: Sequence[Layer]
) -> Iterator[str]:
    found = [key for key in common if ours[key].has_gradients and not theirs[key].has_gradients]
    if found:
        yield f"only in {name}: gradients, of layers {', '.join(_layer_name(*key) for key in found)}"


def _cut(name: str, recording: Recording) -> Iterator[str]:
    """What a trace lacks was compared with nothing, although both may lack it."""
    cut = [line for line in recording.ledger if line.tag is Tag.NORMAL and not line.complete]
    if cut:
        yield f"{name} lacks calls of step {cut[0].step}: {cut[0].cut or 'hooks that did not fire'}"


def _part_record(part: Part) -> dict[str, Any]:
    return {
        **asdict(part),
        "differences": {**asdict(part.differences), "ulps": dict(part.differences.ulps)},
        "place": None if part.place is None else part.place.to_dict(),
    }
