"""One call out of the calls of tensor-parallel processes, each with some of its heads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tracekit.canonical.heads import HeadShards
from tracekit.errors import InvalidCall
from tracekit.model import (
    Array,
    AttentionCall,
    Bits,
    Gradients,
    IndexerCall,
    KVRows,
    Lists,
    Output,
    RequestKey,
    Rows,
    Selection,
    Share,
)

Names = Mapping[RequestKey, RequestKey]
Shards = Sequence[tuple[str, AttentionCall]]


def renamed(call: AttentionCall, names: Names) -> AttentionCall:
    """Return a call with other request keys, as a process of its own: rank 0."""
    grads = call.grads
    if grads is not None:
        grads = replace(grads, d_kv={names[key]: families for key, families in grads.d_kv.items()})
    return replace(
        call,
        rows=_renamed_rows(call.rows, names),
        kv={names[key]: families for key, families in call.kv.items()},
        grads=grads,
        rank=0,
    )


def renamed_indexer(call: IndexerCall, names: Names) -> IndexerCall:
    """Return a call of an indexer likewise."""
    keys = {names[key]: bits for key, bits in call.keys.items()}
    return replace(call, rows=_renamed_rows(call.rows, names), keys=keys, rank=0)


def joined(shards: Shards, share: Share) -> AttentionCall:
    """Return the call of all heads.

    Args:
        shards: name and call of each process, in order of their heads.
        share: place of one of them; says how many KV heads there are.

    Raises:
        InvalidCall: `R-MERGE-CALL` when the calls say different things besides heads; `R-MERGE-HEADS` when
            nobody said how KV heads are shared; `C-TP-UNEVEN`, `C-TP-PARTS`, `C-TP-COPIES`.
    """
    (_, first), *others = shards
    for name, other in others:
        _check_same(shards[0][0], first, name, other)
    if not share.kv_heads:
        raise InvalidCall(
            f"{shards[0][0]} holds {first.num_kv_heads} KV heads and does not say of how many; record with "
            "share=Share(..., kv_heads=N).",
            rule="R-MERGE-HEADS",
        )
    calls = [call for _, call in shards]
    heads = HeadShards(sum(call.num_heads for call in calls), share.kv_heads, len(calls))
    return replace(
        first,
        q=_query([call.q for call in calls], heads),
        kv={key: {f: _kv([c.kv[key][f] for c in calls], heads) for f in first.kv[key]} for key in first.kv},
        sink=None if first.sink is None else _concatenated([_need(call.sink) for call in calls], 0),
        out=_outputs([call.out for call in calls], heads),
        lse=_outputs([call.lse for call in calls], heads),
        grads=_gradients([call.grads for call in calls], heads),
        launch=None,
    )


def joined_indexer(shards: Sequence[tuple[str, IndexerCall]]) -> IndexerCall:
    """Return the call of an indexer that every process ran whole.

    Raises:
        InvalidCall: `R-MERGE-CALL` when two of them differ in a bit.
    """
    (name, first), *others = shards
    for other_name, other in others:
        pairs = [(first.query, other.query), (first.weights, other.weights)]
        pairs += [(first.keys[key], other.keys.get(key, first.query)) for key in first.keys]
        if first.scores is not None and other.scores is not None:
            pairs.append((first.scores, other.scores))
        plain = ("layer", "step", "k", "family", "scale_bits")
        same = all(getattr(first, field) == getattr(other, field) for field in plain)
        same = same and _same_rows(first.rows, other.rows) and _same_lists(first.top_k, other.top_k)
        if not same or any(not a.same(b) for a, b in pairs):
            raise _differ(name, other_name, f"the indexer of layer {first.layer} at step {first.step}")
    return first


def _check_same(name: str, first: AttentionCall, other_name: str, other: AttentionCall) -> None:
    """Refuse two calls that are not the same but for their heads."""
    for what, ours, theirs in (
        ("conventions", first.conventions, other.conventions),
        ("the executed kernel", first.provenance.executed, other.provenance.executed),
        ("the requests of the KV", set(first.kv), set(other.kv)),
        ("whether there are a sink, O, LSE, gradients", _present(first), _present(other)),
        ("the rows", True, _same_rows(first.rows, other.rows)),
        ("the selection", True, _same_selection(first.selection, other.selection)),
        ("which KV rows were read", _extents(first), _extents(other)),
    ):
        if ours != theirs:
            raise _differ(name, other_name, f"{what} of layer {first.layer} at step {first.step}")


def _differ(name: str, other: str, what: str) -> InvalidCall:
    return InvalidCall(
        f"{name} and {other} should say the same but for their heads, and differ in {what}; nothing is "
        "merged.",
        rule="R-MERGE-CALL",
    )


def _present(call: AttentionCall) -> tuple[object, ...]:
    outputs = tuple(None if output is None else output.origin for output in (call.out, call.lse))
    return call.sink is None, call.grads is None, *outputs


def _extents(call: AttentionCall) -> dict[object, tuple[int, int, int]]:
    return {
        (key, family): (rows.first, rows.count, rows.generation)
        for key, families in call.kv.items()
        for family, rows in families.items()
    }


def _same_rows(a: Rows, b: Rows) -> bool:
    names = ("request", "positions", "token_ids")
    return a.requests == b.requests and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in names)


def _same_lists(a: Lists, b: Lists) -> bool:
    return np.array_equal(a.ids, b.ids) and np.array_equal(a.offsets, b.offsets)


def _same_selection(a: Selection, b: Selection) -> bool:
    if list(a.families) != list(b.families):
        return False
    for ours, theirs in zip(a.families.values(), b.families.values(), strict=True):
        if type(ours) is not type(theirs):
            return False
        names = ("ids", "offsets") if isinstance(ours, Lists) else ("lo", "hi")
        if any(not np.array_equal(getattr(ours, n), getattr(theirs, n)) for n in names):
            return False
    return True


def _renamed_rows(rows: Rows, names: Names) -> Rows:
    return replace(rows, requests=tuple(names[key] for key in rows.requests))


def _query(parts: list[Bits], heads: HeadShards) -> Bits:
    return Bits(heads.unshard_query([part.data for part in parts]), parts[0].dtype)


def _kv(parts: list[KVRows], heads: HeadShards) -> KVRows:
    def whole(tensors: list[Bits]) -> Bits:
        return Bits(heads.unshard_kv([bits.data for bits in tensors]), tensors[0].dtype)

    values = None if parts[0].values is None else whole([_need(part.values) for part in parts])
    return replace(parts[0], keys=whole([part.keys for part in parts]), values=values)


def _outputs(parts: list[Output | None], heads: HeadShards) -> Output | None:
    found = [part for part in parts if part is not None]
    return Output(_query([part.bits for part in found], heads), found[0].origin) if found else None


def _gradients(parts: list[Gradients | None], heads: HeadShards) -> Gradients | None:
    """Gradients by head; those of a KV head that several processes share are parts of a sum."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    if heads.copies > 1 and any(part.d_kv for part in found):
        raise InvalidCall(
            "several processes hold one KV head, and each has only its part of the gradient; which sum the "
            "engine makes of them is not recorded, so nothing is merged.",
            rule="R-MERGE-HEADS",
        )
    d_q, d_sink = ([getattr(part, name) for part in found] for name in ("d_q", "d_sink"))
    d_kv = {
        key: {family: _kv([part.d_kv[key][family] for part in found], heads) for family in families}
        for key, families in found[0].d_kv.items()
    }
    return Gradients(
        _query([part.d_out for part in found], heads),
        None if any(bits is None for bits in d_q) else _query(d_q, heads),
        d_kv,
        None if any(bits is None for bits in d_sink) else _concatenated(d_sink, 0),
    )


def _concatenated(parts: list[Bits], axis: int) -> Bits:
    arrays: list[Array] = [part.data for part in parts]
    return Bits(np.concatenate(arrays, axis=axis), parts[0].dtype)


def _need(bits: Bits | None) -> Bits:
    assert bits is not None
    return bits
