"""Fault: KV is found by batch index, in the block table of the first launch.

After ROCm/ATOM #1417 (a request reads the ring of another) and stale block tables in general.
"""

from collections.abc import Sequence

from tracekit.controls.base import Twin, keep
from tracekit.model import Array, AttentionCall, KVRows, RequestKey
from tracekit.providers.base import Execution, Provider, Tensors


class TableByBatchIndex(Twin):
    """A kernel that finds KV by the batch index of its first launch."""

    id = "twin-requests"
    fault = "request i of a batch reads the KV of request i of the first batch"

    def __init__(self, correct: Provider | None = None) -> None:
        super().__init__(correct)
        self.table: Sequence[RequestKey] = ()

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call over the KV that the first launch had at each batch index."""
        self.table = self.table or call.rows.requests
        if set(self.table) == set(call.rows.requests):
            kv = {key: call.kv[other] for key, other in zip(call.rows.requests, self.table, strict=True)}
            of_row = [call.rows.requests[index] for index in call.rows.request]
            call = keep(call, lambda ids, row, family: held(ids, kv[of_row[row]][family])).with_kv(kv)
        return self.right(call, execution)


def held(ids: Array, rows: KVRows) -> Array:
    """Return the ids that some KV holds."""
    return ids[(ids >= rows.first) & (ids < rows.end)]
