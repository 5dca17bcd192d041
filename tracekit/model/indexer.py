"""`IndexerCall`: one launch of a sparse indexer (query, weights, keys -> scores -> top-k)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tracekit.errors import InvalidCall
from tracekit.model.bits import Array, Bits, DType
from tracekit.model.conventions import scale_to_bits
from tracekit.model.kv import KVFamily
from tracekit.model.provenance import Provenance
from tracekit.model.rows import RequestKey, Rows
from tracekit.model.selection import Lists


@dataclass(frozen=True, eq=False)
class IndexerCall:
    """One launch of the indexer of a sparse attention layer.

    The score of row t and key r is `sum over h of weights[t, h] * relu(scale * query[t, h] . keys[r])`. Row t
    chooses among the keys `0 .. family.visible(position) - 1`, and takes all of them where they are not
    more than `k`.

    Args:
        layer: 0-based layer.
        step: 0-based engine step.
        rows: the T query rows.
        query: `[T, H, D]`.
        weights: `[T, H]`, as they met the products: every constant factor but the scale is in them.
        keys: `[N, D]` a request, from row 0 on.
        top_k: the keys chosen for each row, in executed order.
        provenance: which kernel ran.
        k: the most keys that a row may choose.
        family: the KV family whose rows are chosen; key r stands for its row r.
        scale_bits: binary32 bits of the factor on q.k.
        scores: FP32 `[n]`, the scores of `top_k.ids`, or None where they were not recorded.
        rank: rank of the process in its group.

    Raises:
        InvalidCall: `M-INDEX-SHAPE`, `M-INDEX-K`, `M-CALL-KV`, `M-SEL-OUTSIDE`, `M-SEL-CAUSAL`.
    """

    layer: int
    step: int
    rows: Rows
    query: Bits
    weights: Bits
    keys: Mapping[RequestKey, Bits]
    top_k: Lists
    provenance: Provenance
    k: int
    family: KVFamily
    scale_bits: int = scale_to_bits(1.0)
    scores: Bits | None = None
    rank: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", dict(self.keys))
        _check_shapes(self)
        _check_keys(self)
        _check_choice(self)

    @property
    def num_rows(self) -> int:
        """T."""
        return self.query.shape[0]

    @property
    def visible(self) -> Array:
        """int64 `[T]`, how many keys each row chooses among."""
        return (self.rows.positions + 1) // self.family.ratio

    def take(self, order: Array) -> "IndexerCall":
        """Return some rows in another order; keys stay, requests that lose all rows are dropped."""
        order = np.asarray(order, np.int64)
        rows = self.rows.take(order)
        scores = None
        if self.scores is not None:
            offsets = self.top_k.offsets
            parts = [np.arange(offsets[t], offsets[t + 1]) for t in order]
            scores = self.scores.take(np.concatenate([np.zeros(0, np.int64), *parts]))
        return replace(
            self,
            rows=rows,
            query=self.query.take(order),
            weights=self.weights.take(order),
            keys={key: self.keys[key] for key in rows.requests},
            top_k=self.top_k.take(order),
            scores=scores,
        )


def _check_shapes(call: IndexerCall) -> None:
    shape = call.query.shape
    if len(shape) != 3 or min(shape) < 1 or shape[0] != call.rows.count or call.weights.shape != shape[:2]:
        raise InvalidCall(
            f"query is [T, H, D] and weights [T, H] with T = {call.rows.count}, "
            f"not {list(shape)} and {list(call.weights.shape)}.",
            rule="M-INDEX-SHAPE",
        )
    if call.top_k.rows != call.rows.count:
        raise InvalidCall("top_k has one list a query row.", rule="M-INDEX-SHAPE")
    if call.scores is not None and (
        call.scores.shape != call.top_k.ids.shape or call.scores.dtype is not DType.FLOAT32
    ):
        raise InvalidCall("scores has one float32 a chosen key.", rule="M-INDEX-SHAPE")


def _check_keys(call: IndexerCall) -> None:
    needed = np.zeros(len(call.rows.requests), np.int64)
    np.maximum.at(needed, call.rows.request, call.visible)
    for request, count in zip(call.rows.requests, needed.tolist(), strict=True):
        if request not in call.keys:
            raise InvalidCall(f"request {request} has rows but no index keys.", rule="M-CALL-KV")
        keys = call.keys[request]
        if len(keys.shape) != 2 or keys.shape[1] != call.query.shape[2]:
            raise InvalidCall(
                f"keys are [N, {call.query.shape[2]}], not {list(keys.shape)}.", rule="M-INDEX-SHAPE"
            )
        if keys.shape[0] < count:
            raise InvalidCall(
                f"request {request} has {keys.shape[0]} index keys, and a row chooses among {count}.",
                rule="M-CALL-KV",
            )


def _check_choice(call: IndexerCall) -> None:
    counts = np.diff(call.top_k.offsets)
    if call.k < 1 or (counts > call.k).any():
        raise InvalidCall(
            f"a row chose {int(counts.max(initial=0))} keys of at most {call.k}.", rule="M-INDEX-K"
        )
    owner = np.repeat(np.arange(call.num_rows), counts)
    late = call.top_k.ids >= call.visible[owner]
    if late.any():
        at = int(np.argmax(late))
        row = call.rows.ids[int(owner[at])]
        raise InvalidCall(
            f"layer {call.layer}, request {row.request}, position {row.position} chose key "
            f"{int(call.top_k.ids[at])} of {int(call.visible[owner[at]])} that are causally visible.",
            rule="M-SEL-CAUSAL",
        )
