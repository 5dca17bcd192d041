"""Fault: KV is found by batch index, in the block table of the first launch.

After ROCm/ATOM #1417 (a request reads the ring of another) and stale block tables in general. The ring of
another starts elsewhere, so the oldest key is lost: equal prompts hold equal KV and would show no fault.
"""

from collections.abc import Sequence

from tracekit.controls.base import Twin, keep
from tracekit.model import Array, AttentionCall, KVRows, RequestKey
from tracekit.providers.base import Execution, Provider, Tensors


class TableByBatchIndex(Twin):
    """A kernel that finds KV by the batch index of its first launch."""

    id = "twin-requests"
    fault = "request i of a batch reads the KV of request i of the first batch, without the oldest key"

    def __init__(self, correct: Provider | None = None) -> None:
        super().__init__(correct)
        self.table: Sequence[RequestKey] = ()

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call over the KV that the first launch had at each batch index."""
        self.table = self.table or call.rows.requests
        if set(self.table) == set(call.rows.requests):
            call = read_by(call, self.table)
        return self.right(call, execution)


def read_by(call: AttentionCall, table: Sequence[RequestKey]) -> AttentionCall:
    """Return the call with request i over the KV of request i of a table, of another's without its oldest."""
    kv = {key: call.kv[other] for key, other in zip(call.rows.requests, table, strict=True)}
    of_row = [row.request for row in call.rows.ids]
    moved = [kv[key] is not call.kv[key] for key in of_row]
    return keep(call, lambda ids, t, family: held(ids[moved[t] :], kv[of_row[t]][family])).with_kv(kv)


def held(ids: Array, rows: KVRows) -> Array:
    """Return the ids that some KV holds."""
    return ids[(ids >= rows.first) & (ids < rows.end)]
