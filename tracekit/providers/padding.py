"""Padding around a call, and the way back: query slots, heads and requests that nobody asked for."""

from dataclasses import replace

import numpy as np

from tracekit.model import (
    Array,
    AttentionCall,
    Bits,
    KVRows,
    Lists,
    Ranges,
    RequestKey,
    Rows,
    Selection,
)
from tracekit.providers.base import Tensors
from tracekit.providers.placement import Padding, Placement

_ORDINAL = 700_000_000
"""Ordinal of the first request of padding; the companions of claims count from 500 million."""


def padded(call: AttentionCall, placement: Placement) -> AttentionCall:
    """Return a call with padding: slots that read nothing, heads, empty requests.

    Half of the slots and half of the requests, rounded up, stand in front, and so do all heads: what counts
    rows, heads or requests as if nothing had been added then takes others. Queries of the slots are rows of
    the call, or the fill of the placement.
    """
    padding = placement.padding
    call = more_heads(call, padding.get(Padding.HEADS, 0))
    slots, requests = padding.get(Padding.ROWS, 0), padding.get(Padding.REQUESTS, 0)
    if slots + requests == 0:
        return call
    front, ahead = front_slots(placement), front_requests(placement)
    donor = call.rows.requests[0]
    # The last of them owns the slots.
    names = tuple(RequestKey(donor.digest, _ORDINAL + i) for i in range(requests + 1))
    at = np.concatenate([np.full(front, -1), np.arange(call.num_rows), np.full(slots - front, -1)])
    real = at >= 0
    count = len(call.rows.requests)
    numbers = np.where(real, call.rows.request[at] + ahead, count + requests).astype(np.int32)
    positions = np.where(real, call.rows.positions[at], np.cumsum(~real) - 1)
    rows = Rows(
        (*names[:ahead], *call.rows.requests, *names[ahead:]),
        numbers,
        positions,
        np.where(real, call.rows.token_ids[at], -1),
    )
    q = call.q.data[at]
    if placement.fill is not None:
        q[~real] = placement.fill.pattern(call.dtype)
    nothing = {family: _none(call.kv[donor][family]) for family in call.kv[donor]}
    return replace(
        call,
        rows=rows,
        q=Bits(q, call.dtype),
        kv={**call.kv, **dict.fromkeys(names, nothing)},
        selection=Selection({f: _spread(part, at) for f, part in call.selection.families.items()}),
        out=None,
        lse=None,
        launch=None,
        grads=None,
    )


def more_heads(call: AttentionCall, extra: int) -> AttentionCall:
    """Return a call with `extra` query heads before those of each KV head.

    They are the first of those with the signs of their queries turned: none gives the answer of another.
    """
    if extra == 0:
        return call
    at = _head_order(call, extra)
    sink = None if call.sink is None else call.sink.take(at)
    q = call.q.data[:, at]
    added = np.ones(at.size, np.bool_)
    added[real_heads(call, extra)] = False
    q[:, added] ^= q.dtype.type(1 << (8 * q.itemsize - 1))
    return replace(call, q=Bits(q, call.dtype), sink=sink, out=None, lse=None, launch=None, grads=None)


def real_heads(call: AttentionCall, extra: int) -> Array:
    """Return int64 `[H]`, where the heads of a call stand among those of `more_heads`."""
    group = call.num_heads // call.num_kv_heads
    head = np.arange(call.num_heads)
    return head // group * (group + extra) + extra + head % group


def real_rows(call: AttentionCall) -> Array:
    """Return int64 `[T]`, the rows of a call that are no slots of `padded`."""
    real = np.array([key.ordinal < _ORDINAL for key in call.rows.requests])
    return np.flatnonzero(real[call.rows.request])


def front_slots(placement: Placement) -> int:
    """Return how many slots stand before the rows."""
    return -(-placement.padding.get(Padding.ROWS, 0) // 2)


def front_requests(placement: Placement) -> int:
    """Return how many empty requests stand before those of the call."""
    return -(-placement.padding.get(Padding.REQUESTS, 0) // 2)


def without_padding(tensors: Tensors, call: AttentionCall, placement: Placement) -> Tensors:
    """Return the answer to the padded call as that to the call."""
    front, heads = front_slots(placement), real_heads(call, placement.padding.get(Padding.HEADS, 0))
    rows = slice(front, front + call.num_rows)
    out = Bits(tensors.out.data[rows][:, heads], tensors.out.dtype)
    lse = tensors.lse and Bits(tensors.lse.data[rows][:, heads], tensors.lse.dtype)
    return Tensors(out, lse)


def _head_order(call: AttentionCall, extra: int) -> Array:
    """Int64 `[H + Hkv * extra]`, the head of the call that each head of the padded call copies."""
    group = call.num_heads // call.num_kv_heads
    inside = np.concatenate([np.zeros(extra, np.int64), np.arange(group)])
    order: Array = (np.arange(call.num_kv_heads)[:, None] * group + inside).reshape(-1)
    return order


def _none(rows: KVRows) -> KVRows:
    return KVRows(rows.keys.part(slice(0)), None if rows.values is None else rows.values.part(slice(0)))


def _spread(part: Ranges | Lists, at: Array) -> Ranges | Lists:
    """The selection of the rows of a padded call; padding reads nothing."""
    if isinstance(part, Ranges):
        return Ranges(np.where(at >= 0, part.lo[at], 0), np.where(at >= 0, part.hi[at], 0))
    nothing = np.zeros(0, np.int64)
    return Lists.of([part.row(int(t)) if t >= 0 else nothing for t in at])
