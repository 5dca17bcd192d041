"""Prefills of other requests to run beside a call, made from the call's own numbers."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tracekit.model import (
    Array,
    AttentionCall,
    Bits,
    KVFamily,
    KVRows,
    Lists,
    Ranges,
    RequestKey,
    Rows,
    Selection,
)
from tracekit.relations.arrange import join

_ORDINAL = 500_000_000
"""Ordinal of the first companion; `arrange.foreign` counts in millions from the call's own ordinals."""

LAUNCHES = (
    ("companions of 2 and 11 rows (as in vLLM #51902)", 2, 11),
    ("companions of 17 and 65 rows", 17, 65),
)
"""Name, rows of the companion over longer KV, rows of the one over shorter KV.

Each number is one past a threshold that a kernel is known to switch at. The larger companion has the shorter
KV, so that a launch costs no more than the sizes that `subbatch` tries anyway.
"""


def in_company(call: AttentionCall) -> Iterator[tuple[str, AttentionCall]]:
    """Yield the call between two prefills of other requests, which are run and not compared.

    The one in front continues where the longest KV of the call ends; the one behind starts at the first
    position that sees a row of every family.
    """
    start, end = first_position(call), end_of_longest(call)
    for number, (name, after, before) in enumerate(LAUNCHES):
        front = companion(call, end, after, 2 * number)
        behind = companion(call, start, before, 2 * number + 1)
        yield name, join([front, call, behind])


def companion(call: AttentionCall, start: int, rows: int, number: int = 0) -> AttentionCall:
    """Return a prefill of one other request, its Q and KV repeated from the call.

    Args:
        call: gives numbers, families, the width of windows and the length of lists.
        start: the first position; row i stands at `start + i`.
        rows: query rows.
        number: tells companions of one launch apart.
    """
    donor = call.rows.requests[0]
    key = RequestKey(donor.digest, _ORDINAL + number)
    positions = start + np.arange(rows)
    families: dict[KVFamily, Ranges | Lists] = {}
    kv: dict[KVFamily, KVRows] = {}
    for family, part in call.selection.families.items():
        visible = (positions + 1) // family.ratio
        width = int(_widths(part).max())
        everything = isinstance(part, Ranges) and not part.lo.any() and call.conventions.window is None
        lo = np.zeros_like(visible) if everything else np.maximum(visible - max(width, 1), 0)
        ranges = Ranges(lo, visible)
        listed = isinstance(part, Lists)
        families[family] = Lists.of([ranges.row(t) for t in range(rows)]) if listed else ranges
        kv[family] = _repeated(call.kv[donor][family], int(visible[-1]))
    at = np.arange(rows) % call.num_rows
    return replace(
        call,
        rows=Rows((key,), np.zeros(rows, np.int32), positions, call.rows.token_ids[at]),
        q=call.q.take(at),
        kv={key: kv},
        selection=Selection(families),
        out=None,
        lse=None,
        launch=None,
        grads=None,
    )


def first_position(call: AttentionCall) -> int:
    """Return the first position that sees a row of every family."""
    return max(family.ratio for family in call.selection.families) - 1


def end_of_longest(call: AttentionCall) -> int:
    """Return the position behind the longest KV of a call, or `first_position` where that is later."""
    ends = [rows.end * family.ratio for kv in call.kv.values() for family, rows in kv.items()]
    return max(first_position(call), *ends)


def _widths(part: Ranges | Lists) -> Array:
    return np.diff(part.offsets) if isinstance(part, Lists) else np.maximum(part.hi - part.lo, 0)


def _repeated(rows: KVRows, count: int) -> KVRows:
    """Return rows 0 .. count - 1, those that are held over and over; zeros where none is held."""

    def longer(bits: Bits) -> Bits:
        if not rows.count:
            return Bits(np.zeros((count, *bits.shape[1:]), bits.data.dtype), bits.dtype)
        return bits.take(np.arange(count) % rows.count)

    return KVRows(longer(rows.keys), None if rows.values is None else longer(rows.values))
