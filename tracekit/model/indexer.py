"""`IndexerCall`: one launch of a sparse indexer (query, weights, keys -> scores -> top-k)."""

from collections.abc import Mapping
from dataclasses import dataclass

from tracekit.errors import InvalidCall
from tracekit.model.bits import Bits
from tracekit.model.provenance import Provenance
from tracekit.model.rows import RequestKey, Rows
from tracekit.model.selection import Lists


@dataclass(frozen=True, eq=False)
class IndexerCall:
    """One launch of the indexer of a sparse attention layer.

    The score of row t and key r is `sum over h of weights[t, h] * relu(query[t, h] . keys[r])`.

    Args:
        layer: 0-based layer.
        step: 0-based engine step.
        rows: the T query rows.
        query: `[T, H, D]`.
        weights: `[T, H]`.
        keys: `[N, D]` a request.
        top_k: the keys chosen for each row, in executed order.
        provenance: which kernel ran.
        scores: `[n]`, the scores of `top_k.ids`, or None where they were not recorded.

    Raises:
        InvalidCall: `M-INDEX-SHAPE`, `M-CALL-KV`, `M-SEL-OUTSIDE`.
    """

    layer: int
    step: int
    rows: Rows
    query: Bits
    weights: Bits
    keys: Mapping[RequestKey, Bits]
    top_k: Lists
    provenance: Provenance
    scores: Bits | None = None

    def __post_init__(self) -> None:
        shape = self.query.shape
        if len(shape) != 3 or shape[0] != self.rows.count or self.weights.shape != shape[:2]:
            raise InvalidCall(
                f"query is [T, H, D] and weights [T, H] with T = {self.rows.count}, "
                f"not {list(shape)} and {list(self.weights.shape)}.",
                rule="M-INDEX-SHAPE",
            )
        if self.top_k.rows != self.rows.count:
            raise InvalidCall("top_k has one list a query row.", rule="M-INDEX-SHAPE")
        if self.scores is not None and self.scores.shape != self.top_k.ids.shape:
            raise InvalidCall("scores has one element a chosen key.", rule="M-INDEX-SHAPE")
        for t, row in enumerate(self.rows.ids):
            if row.request not in self.keys:
                raise InvalidCall(f"request {row.request} has rows but no index keys.", rule="M-CALL-KV")
            chosen, keys = self.top_k.row(t), self.keys[row.request]
            if len(keys.shape) != 2 or keys.shape[1] != shape[2]:
                raise InvalidCall(f"keys are [N, {shape[2]}], not {list(keys.shape)}.", rule="M-INDEX-SHAPE")
            if chosen.size and int(chosen.max()) >= keys.shape[0]:
                raise InvalidCall(
                    f"row {t} chose key {int(chosen.max())} of {keys.shape[0]}.", rule="M-SEL-OUTSIDE"
                )
