"""Training, recompute and rollout, byte for byte: the rows that two sets of calls have in common.

Rows meet by `(request key, position)`, so the order of rows, the batch and the chunks say nothing. What was
not compared is not proved: a missing row, an output that no kernel executed, a NaN, nothing at all.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from tracekit.compare.alignment import Pair
from tracekit.compare.layer_diff import ABSENT, DIFFERS, EQUAL, Part, layer_parts
from tracekit.compare.layer_view import LayerView
from tracekit.gate.finite import finite
from tracekit.model import AttentionCall, Bits, KVFamily, Origin, RequestKey
from tracekit.verdict import Place


class Finding(StrEnum):
    """What a check came to. Only `SAME` and `ABSENT` (neither side has a sink) prove anything."""

    SAME = "same"
    ABSENT = "absent"
    DIFFERS = "differs"
    MISSING = "missing"
    NOT_FINITE = "not finite"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Check:
    """One tensor of one layer.

    Args:
        layer: 0-based.
        tensor: `rows` (which there are), `conventions`, `q`, `keys`, `values`, `sink`, `selection set`,
            `selection order`, `out`, `lse`, or `storage FAMILY`.
        finding: what it came to.
        elements: how many were compared.
        reason: why not more can be said.
        place: the first element that differs.
    """

    layer: int
    tensor: str
    finding: Finding
    elements: int = 0
    reason: str = ""
    place: Place | None = None


@dataclass(frozen=True)
class Proof:
    """The checks of every layer."""

    checks: tuple[Check, ...]

    @property
    def proved(self) -> bool:
        """Whether something was compared and everything is the same."""
        good = {Finding.SAME, Finding.ABSENT}
        return bool(self.checks) and all(check.finding in good for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that prove nothing, in the order of the data."""
        return tuple(c for c in self.checks if c.finding not in (Finding.SAME, Finding.ABSENT))

    def find(self, tensor: str, layer: int = 0) -> Check:
        """Return the check of a tensor of a layer.

        Raises:
            KeyError: there is none.
        """
        for check in self.checks:
            if (check.tensor, check.layer) == (tensor, layer):
                return check
        raise KeyError(f"no check of {tensor} in layer {layer}")


class CacheRows(NamedTuple):
    """KV rows as a cache holds them: the storage tier, which other bytes can decode to equal values in.

    Args:
        format: name of the encoding; two names are never equal.
        first: logical index of row 0.
        data: uint8 `[N, W]`.
        scales: uint8 `[N, S]`; S is 0 where the rows have none.
    """

    format: str
    first: int
    data: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
    scales: np.ndarray[tuple[int, int], np.dtype[np.uint8]]


Storage = Mapping[tuple[int, RequestKey, KVFamily], CacheRows]
"""By layer, request and family."""

_WORDS = {EQUAL: Finding.SAME, DIFFERS: Finding.DIFFERS, ABSENT: Finding.ABSENT}
_NONE: Storage = {}


def prove(
    base: Iterable[AttentionCall],
    other: Iterable[AttentionCall],
    *,
    base_storage: Storage = _NONE,
    other_storage: Storage = _NONE,
) -> Proof:
    """Compare every row of `other` with the row that it repeats.

    Args:
        base: the calls of the first time, such as those of a rollout.
        other: the calls that computed the rows again, in any order and cut.
        base_storage: the cache rows behind `base`, where there is a storage tier.
        other_storage: those behind `other`.

    Returns:
        The checks, layer by layer, in the order of the data. The value tier is `keys` and `values`.
    """
    ours, theirs = list(base), list(other)
    mine, views = LayerView.of_trace(ours), LayerView.of_trace(theirs)
    checks: list[Check] = []
    for layer, rank in sorted(views):
        view, first = views[layer, rank], mine.get((layer, rank), LayerView())
        missing = _missing(layer, first, view)
        checks.append(missing)
        pairs = [Pair(key, key, 1 + max(rows)) for key, rows in view.rows.items() if key in first.rows]
        for part in layer_parts(layer, first, view, pairs):
            checks.append(_check(part, [call for call in theirs if (call.layer, call.rank) == (layer, rank)]))
    checks += _storage(base_storage, other_storage)
    return Proof(tuple(checks))


def _missing(layer: int, base: LayerView, other: LayerView) -> Check:
    """Every row of the other side is one of the base."""
    rows = 0
    for key, positions in other.rows.items():
        for position in sorted(positions):
            rows += 1
            if position not in base.rows.get(key, {}):
                text = f"request {key} has no row {position} the first time"
                return Check(layer, "rows", Finding.MISSING, rows, text)
    return Check(layer, "rows", Finding.SAME if rows else Finding.NOT_COMPARED, rows)


def _check(part: Part, calls: list[AttentionCall]) -> Check:
    finding = _WORDS.get(part.verdict, Finding.NOT_COMPARED)
    if finding is Finding.SAME and not all(finite(bits) for bits in _tensors(part.tensor, calls)):
        # equal bits of a NaN are equal garbage
        return Check(part.layer, part.tensor, Finding.NOT_FINITE, part.compared.elements, "a NaN or infinity")
    elements = part.compared.elements
    if finding is Finding.SAME and not elements:
        finding = Finding.NOT_COMPARED
    return Check(part.layer, part.tensor, finding, elements, part.reason, part.place)


def _tensors(name: str, calls: list[AttentionCall]) -> Iterator[Bits]:
    for call in calls:
        output = {"out": call.out, "lse": call.lse}.get(name)
        if output is not None and output.origin is Origin.EXECUTED:
            yield output.bits
        elif name == "q":
            yield call.q
        elif name == "sink" and call.sink is not None:
            yield call.sink
        elif name in ("keys", "values"):
            for families in call.kv.values():
                for rows in families.values():
                    yield rows.keys if name == "keys" else rows.value_bits


def _storage(base: Storage, other: Storage) -> Iterator[Check]:
    for (layer, key, family), theirs in other.items():
        ours = base.get((layer, key, family))
        if ours is None:
            text = f"request {key} has no rows the first time"
            yield Check(layer, f"storage {family}", Finding.MISSING, reason=text)
        else:
            yield _cache_rows(layer, key, f"storage {family}", ours, theirs)


def _cache_rows(layer: int, key: RequestKey, name: str, ours: CacheRows, theirs: CacheRows) -> Check:
    """Compare the bytes of rows and of their scales; a format is part of the bytes."""
    first = max(ours.first, theirs.first)
    end = min(side.first + len(side.data) for side in (ours, theirs))
    kinds = [(side.format, side.data.shape[1], side.scales.shape[1]) for side in (ours, theirs)]
    if kinds[0] != kinds[1]:
        text = " against ".join(f"{kind}, {width} and {scales} bytes a row" for kind, width, scales in kinds)
        return Check(layer, name, Finding.DIFFERS, reason=text)
    if end <= first:
        return Check(layer, name, Finding.NOT_COMPARED, reason="no common row")
    a, b = (
        np.concatenate([part[first - side.first : end - side.first] for part in (side.data, side.scales)], 1)
        for side in (ours, theirs)
    )
    different = np.argwhere(a != b)
    if not different.size:
        return Check(layer, name, Finding.SAME, a.size)
    row, at = (int(i) for i in different[0])
    was, now = int(a[row, at]), int(b[row, at])
    place = Place(str(key), first + row, layer, 0, at, name, f"0x{was:02x}", f"0x{now:02x}", was, now)
    return Check(layer, name, Finding.DIFFERS, a.size, place=place)
