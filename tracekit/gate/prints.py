"""Fingerprints of rows: 16 bytes a row and tensor, by who the row is, so that any order of rows agrees.

A print proves that bytes are the same; `tracekit.gate.proof` compares the bytes themselves and says where
they differ.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tracekit.gate.launch import Extent
from tracekit.model import AttentionCall, Bits, KVFamily
from tracekit.providers.base import Tensors

_RATIOS = {f"{family} {part}": family.ratio for family in KVFamily for part in ("keys", "values")}


class Place(NamedTuple):
    """What a print is of: a tensor of a layer, and a row of it."""

    tensor: str
    layer: int
    request: str
    row: int

    @property
    def fields(self) -> dict[str, Any]:
        """The place as an error names it."""
        return {"request": self.request, "layer": self.layer, "position": self.row, "tensor": self.tensor}

    def behind(self, position: int) -> bool:
        """Whether its row is not complete before a position."""
        return self.row >= position // _RATIOS.get(self.tensor, 1)


Prints = dict[Place, bytes]


def inputs(call: AttentionCall, spans: list[Extent], *, held: bool = False) -> Prints:
    """Return the prints of Q and of the KV rows that a call writes, or of all that it holds.

    Args:
        call: the call.
        spans: its rows.
        held: also of the rows that were there before.
    """
    prints: Prints = {}
    for t, row in enumerate(call.rows.ids):
        prints[Place("q", call.layer, str(row.request), row.position)] = _row(call.q, t)
    for key, name, first, end in spans:
        for family, rows in call.kv[key].items():
            start = rows.first if held else max(rows.first, first // family.ratio)
            for number in range(start, min(rows.end, end // family.ratio)):
                at = number - rows.first
                prints[Place(f"{family} keys", call.layer, name, number)] = _row(rows.keys, at)
                if rows.values is not None:
                    prints[Place(f"{family} values", call.layer, name, number)] = _row(rows.values, at)
    return prints


def everything(call: AttentionCall, spans: list[Extent], answer: Tensors) -> Prints:
    """Return the prints of what a call was given and of what it answered.

    The selection has two: the set, and the order in which the kernel read it.
    """
    prints = inputs(call, spans, held=True)
    for t, row in enumerate(call.rows.ids):
        who = call.layer, str(row.request), row.position
        prints[Place("out", *who)] = _row(answer.out, t)
        if answer.lse is not None:
            prints[Place("lse", *who)] = _row(answer.lse, t)
        if call.sink is not None:
            prints[Place("sink", *who)] = _digest(call.sink)
        chosen = [(family.value, ids.tolist()) for family, ids in call.selection.row(t)]
        prints[Place("selection order", *who)] = _lists(chosen)
        prints[Place("selection set", *who)] = _lists(sorted((name, sorted(ids)) for name, ids in chosen))
    return prints


def differing(known: Prints, found: Prints) -> Iterator[Place]:
    """Yield the places where both have a print and the two differ."""
    return (place for place, value in found.items() if known.get(place, value) != value)


def _row(bits: Bits, at: int) -> bytes:
    return _digest(bits.part(at))


def _digest(bits: Bits) -> bytes:
    found = hashlib.blake2b(f"{bits.dtype} {bits.shape} ".encode(), digest_size=16)
    found.update(bits.data.tobytes())
    return found.digest()


def _lists(chosen: Iterable[tuple[str, Iterable[int]]]) -> bytes:
    text = ";".join(f"{name}:{','.join(map(str, ids))}" for name, ids in chosen)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
