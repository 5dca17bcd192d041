"""Bytes against bytes: which elements differ, where the first one is, and by how much.

Floats are decoded only to be shown. +0 differs from -0, and a NaN equals only its own payload.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tracekit.compare import ulp
from tracekit.model import Array, Bits, Rows
from tracekit.verdict import Compared, Differences, Place


@dataclass(frozen=True)
class Comparison:
    """What a comparison found; comparisons add up, and the first place of the left one comes first."""

    compared: Compared = field(default_factory=Compared)
    differences: Differences = field(default_factory=Differences)
    first: Place | None = None

    @property
    def same(self) -> bool:
        """Whether no element differs; says nothing when nothing was compared."""
        return self.differences.elements == 0

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(
            self.compared + other.compared,
            add_differences(self.differences, other.differences),
            self.first or other.first,
        )


def add_differences(left: Differences, right: Differences) -> Differences:
    """Add two counts of differences."""
    return Differences(
        left.elements + right.elements,
        left.rows + right.rows,
        max(left.max_ulps, right.max_ulps),
        ulp.merge(left.ulps, right.ulps),
    )


def compare_bits(
    pairs: Mapping[str, tuple[Bits, Bits]], rows: Rows, layer: int, index: Array | None = None
) -> Comparison:
    """Compare tensors whose rows are already aligned.

    Args:
        pairs: tensor name -> (expected, actual), rows first, heads second: `[T, H, ...]`.
        rows: the rows of the trace.
        layer: the layer, for the place.
        index: int64 `[T]`, which row of `rows` each compared row is; all of them in order where absent.

    Returns:
        The comparison. Its first place is the first one by (row of the trace, head, element); where two
        tensors differ in one row, the tensor named first comes first.

    Raises:
        ValueError: a pair differs in shape or dtype, or does not hold the rows of `index`.
    """
    index = np.arange(rows.count) if index is None else index
    differing_rows = np.zeros(index.size, np.bool_)
    elements, total, most = 0, 0, 0
    counts: ulp.Histogram = ()
    candidates: list[tuple[int, int, str, int]] = []
    for order, (name, (expected, actual)) in enumerate(pairs.items()):
        if (
            expected.dtype != actual.dtype
            or expected.shape != actual.shape
            or len(expected.data) != index.size
        ):
            raise ValueError(f"{name}: {expected} and {actual} over {index.size} rows cannot be compared")
        total += expected.size
        different = expected.data != actual.data
        found = int(np.count_nonzero(different))
        if not found:
            counts = ulp.merge(counts, ((ulp.SAME, expected.size),) if expected.size else ())
            continue
        elements += found
        steps, special = ulp.distances(expected, actual)
        most = max(most, int(steps.max()))
        counts = ulp.merge(counts, ulp.histogram(steps, special))
        row_differs = different.reshape(index.size, -1).any(axis=1)
        differing_rows |= row_differs
        where = np.flatnonzero(row_differs)
        at = int(where[np.argmin(index[where])])
        candidates.append((int(index[at]), order, name, at))
    first = None
    if candidates:
        _, _, name, at = min(candidates)
        first = _place(name, *pairs[name], rows, int(index[at]), at, layer)
    compared = Compared(len(pairs), total, index.size) if total else Compared()
    return Comparison(
        compared, Differences(elements, int(np.count_nonzero(differing_rows)), most, counts), first
    )


def _place(name: str, expected: Bits, actual: Bits, rows: Rows, row: int, at: int, layer: int) -> Place:
    """The first differing element of row `at`."""
    coordinate = np.unravel_index(int(np.argmax(expected.data[at] != actual.data[at])), expected.shape[1:])
    return place_at(name, expected, actual, rows, row, layer, (at, *(int(i) for i in coordinate)))


def place_at(
    name: str, expected: Bits, actual: Bits, rows: Rows, row: int, layer: int, where: tuple[int, ...]
) -> Place:
    """Name one element: `where` is its coordinate in the tensors, `row` its row in the trace."""
    one = tuple(slice(i, i + 1) for i in where)
    left, right = expected.part(one), actual.part(one)
    steps, special = ulp.distances(left, right)
    identity = rows.ids[row]
    return Place(
        request=str(identity.request),
        position=identity.position,
        layer=layer,
        head=where[1],
        element=where[2] if len(where) > 2 else None,
        tensor=name,
        expected_bits=ulp.pattern(int(left.data.item()), left.dtype),
        actual_bits=ulp.pattern(int(right.data.item()), right.dtype),
        expected=float(left.to_float32().item()),
        actual=float(right.to_float32().item()),
        ulps=int(steps.item()) if special.item() < 2 else None,
    )
