"""Ways to re-arrange a call that several relations share."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tracekit.model import Array, AttentionCall, Bits, KVFamily, Lists, Ranges, RequestKey, Rows, Selection


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
    """Return the call as other requests with the same numbers: rows that are run, but not compared.

    Their ordinals lie above every ordinal of the call; another `number` gives requests of another kind again.
    """
    above = (number + 1) * (1 + max(key.ordinal for key in call.rows.requests))
    renamed = {key: RequestKey(key.digest, key.ordinal + above) for key in call.rows.requests}
    rows = Rows(
        tuple(renamed[key] for key in call.rows.requests),
        call.rows.request,
        call.rows.positions,
        call.rows.token_ids,
    )
    kv = {renamed[key]: call.kv[key] for key in call.rows.requests}
    return replace(call, rows=rows, kv=kv, out=None, lse=None, launch=None, grads=None)


def join(calls: Sequence[AttentionCall]) -> AttentionCall:
    """Return one call with the rows of all; their requests are different ones."""
    first = np.cumsum([0] + [len(call.rows.requests) for call in calls])
    rows = Rows(
        tuple(key for call in calls for key in call.rows.requests),
        np.concatenate([call.rows.request + start for call, start in zip(calls, first, strict=False)]),
        np.concatenate([call.rows.positions for call in calls]),
        np.concatenate([call.rows.token_ids for call in calls]),
    )
    return replace(
        calls[0],
        rows=rows,
        q=Bits(np.concatenate([call.q.data for call in calls]), calls[0].q.dtype),
        kv={key: families for call in calls for key, families in call.kv.items()},
        selection=_joined([call.selection for call in calls]),
        out=None,
        lse=None,
        launch=None,
        grads=None,
    )


def _joined(selections: Sequence[Selection]) -> Selection:
    families: dict[KVFamily, Ranges | Lists] = {}
    for family in selections[0].families:
        parts = [selection.families[family] for selection in selections]
        ranges = [part for part in parts if isinstance(part, Ranges)]
        if len(ranges) == len(parts):
            lo, hi = (np.concatenate([getattr(part, end) for part in ranges]) for end in ("lo", "hi"))
            families[family] = Ranges(lo, hi)
        else:
            families[family] = Lists.of([part.row(t) for part in parts for t in range(part.rows)])
    return Selection(families)
