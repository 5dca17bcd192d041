"""Digests of what a rank owned: told by the rank after it ran, taken again from the trace by the judge.

A rank that says one thing and a trace that holds another are found by comparing the two.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from tracekit.contract.topology import Range, Sharding
from tracekit.model import AttentionCall, Bits, KVFamily, RequestKey

Piece = tuple[str, int, RequestKey, Bits]
"""Tensor, layer, request and `[n, heads, ...]` at the rank's positions, ascending."""


def digests(pieces: Iterable[Piece]) -> dict[str, str]:
    """Return the SHA-256 of each tensor, hexadecimal, over its layers and requests in order."""
    ordered = sorted(pieces, key=lambda piece: (piece[0], piece[1], piece[2]))
    found = {}
    for tensor, group in groupby(ordered, key=lambda piece: piece[0]):
        digest = hashlib.sha256()
        for _, layer, request, bits in group:
            head = [layer, str(request), bits.dtype.value, list(bits.shape)]
            digest.update(json.dumps(head).encode() + b"\n")
            digest.update(bits.data.tobytes())
        found[tensor] = digest.hexdigest()
    return found


def shard_pieces(calls: Iterable[AttentionCall], sharding: Sharding) -> Iterator[Piece]:
    """Yield what a rank owns of whole calls: its heads at its tokens. Of a row that was computed several
    times the last answer counts, and of KV the last rows that a call read.
    """
    rows: dict[tuple[str, int, RequestKey], dict[int, Bits]] = {}
    kv: dict[tuple[int, RequestKey], AttentionCall] = {}
    for call in calls:
        for tensor, bits in _row_tensors(call):
            for t, row in enumerate(call.rows.ids):
                if _owned(row.position, sharding.blocks):
                    rows.setdefault((tensor, call.layer, row.request), {})[row.position] = bits.part(
                        np.s_[t, _heads(sharding, "q")]
                    )
        for key in call.rows.requests:
            last = kv.get((call.layer, key), call)
            if _dense_rows(call, key) >= _dense_rows(last, key):
                kv[call.layer, key] = call
    for (tensor, layer, key), found in rows.items():
        held = [found[position] for position in sorted(found)]
        yield tensor, layer, key, Bits(np.stack([row.data for row in held]), held[0].dtype)
    for (layer, key), call in kv.items():
        for tensor, bits in _kv_tensors(call, key):
            first = call.kv[key][KVFamily.DENSE].first
            owned = [p for p in range(first, first + bits.shape[0]) if _owned(p, sharding.blocks)]
            yield (
                tensor,
                layer,
                key,
                bits.take(np.array(owned, np.int64) - first).part(np.s_[:, _heads(sharding, "kv")]),
            )


def _row_tensors(call: AttentionCall) -> Iterator[tuple[str, Bits]]:
    yield "q", call.q
    if call.out is not None:
        yield "out", call.out.bits
    if call.lse is not None:
        yield "lse", call.lse.bits
    if call.grads is not None:
        yield "d_out", call.grads.d_out
        if call.grads.d_q is not None:
            yield "d_q", call.grads.d_q


def _kv_tensors(call: AttentionCall, key: RequestKey) -> Iterator[tuple[str, Bits]]:
    dense = call.kv[key].get(KVFamily.DENSE)
    if dense is not None:
        yield "keys", dense.keys
        yield "values", dense.value_bits
        grads = {} if call.grads is None else call.grads.d_kv.get(key, {})
        if KVFamily.DENSE in grads:
            yield "d_keys", grads[KVFamily.DENSE].keys
            yield "d_values", grads[KVFamily.DENSE].value_bits


def _dense_rows(call: AttentionCall, key: RequestKey) -> int:
    dense = call.kv[key].get(KVFamily.DENSE)
    return 0 if dense is None else dense.end


def _heads(sharding: Sharding, kind: str) -> slice:
    if kind == "q":
        return slice(sharding.local_q_head_start, sharding.local_q_head_start + sharding.local_q_heads)
    return slice(sharding.local_kv_head_start, sharding.local_kv_head_start + sharding.local_kv_heads)


def _owned(position: int, blocks: tuple[Range, ...]) -> bool:
    return any(start <= position < stop for start, stop in blocks)
