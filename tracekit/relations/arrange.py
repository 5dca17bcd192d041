"""Ways to re-arrange a call that several relations share."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tracekit.model import Array, AttentionCall, Bits, KVFamily, Lists, Ranges, RequestKey, Rows, Selection

_FOREIGN = 1_000_000
"""Added to the ordinal of a request to make another request of it; no recording has so many equal prompts."""


def orders(count: int, random: np.random.Generator, permutations: int = 3) -> Iterator[tuple[str, Array]]:
    """Yield named orders of `count` things, each once and never the identity."""
    identity = np.arange(count)
    named = [("reversed", identity[::-1]), ("rotated by one", np.roll(identity, -1))]
    named.append(("rotated by half", np.roll(identity, -(count // 2))))
    named += [(f"permutation {i + 1}", random.permutation(count)) for i in range(permutations)]
    seen = {identity.tobytes()}
    for name, order in named:
        key = np.ascontiguousarray(order).tobytes()
        if key not in seen:
            seen.add(key)
            yield name, order


def groups(count: int, size: int) -> list[Array]:
    """Cut `0 .. count - 1` into runs of `size`; the last may be shorter."""
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


def by_request(call: AttentionCall) -> list[Array]:
    """Return the rows of each request, ascending by position."""
    rows = [np.flatnonzero(call.rows.request == index) for index in range(len(call.rows.requests))]
    return [part[np.argsort(call.rows.positions[part])] for part in rows]


def foreign(call: AttentionCall, number: int = 0) -> AttentionCall:
    """Return the call as other requests with the same numbers: rows that are run, but not compared."""
    renamed = {
        key: RequestKey(key.digest, key.ordinal + _FOREIGN * (number + 1)) for key in call.rows.requests
    }
    rows = Rows(
        tuple(renamed[key] for key in call.rows.requests),
        call.rows.request,
        call.rows.positions,
        call.rows.token_ids,
    )
    kv = {renamed[key]: call.kv[key] for key in call.rows.requests}
    return replace(call, rows=rows, kv=kv, out=None, lse=None, launch=None, grads=None)


def join(left: AttentionCall, right: AttentionCall) -> AttentionCall:
    """Return one call with the rows of both; their requests are different ones."""
    rows = Rows(
        left.rows.requests + right.rows.requests,
        np.concatenate([left.rows.request, right.rows.request + len(left.rows.requests)]),
        np.concatenate([left.rows.positions, right.rows.positions]),
        np.concatenate([left.rows.token_ids, right.rows.token_ids]),
    )
    return replace(
        left,
        rows=rows,
        q=Bits(np.concatenate([left.q.data, right.q.data]), left.q.dtype),
        kv={**left.kv, **right.kv},
        selection=_joined(left.selection, right.selection),
        out=None,
        lse=None,
        launch=None,
        grads=None,
    )


def _joined(left: Selection, right: Selection) -> Selection:
    families: dict[KVFamily, Ranges | Lists] = {}
    for family, one in left.families.items():
        other = right.families[family]
        if isinstance(one, Ranges) and isinstance(other, Ranges):
            families[family] = Ranges(np.concatenate([one.lo, other.lo]), np.concatenate([one.hi, other.hi]))
        else:
            rows = [part.row(t) for part in (one, other) for t in range(part.rows)]
            families[family] = Lists.of(rows)
    return Selection(families)
