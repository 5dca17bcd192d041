"""Fault: a later chunk sees only its own rows.

After hw-native-sys/pypto-lib #592 (from the second chunk on, rows of the first chunk are not scored).
"""

import numpy as np

from tracekit.controls.base import Twin, keep
from tracekit.model import Array, AttentionCall, RequestKey
from tracekit.providers.base import Execution, Provider, Tensors


class ChunkOnly(Twin):
    """A kernel whose later chunks see only themselves."""

    id = "twin-chunks"
    fault = "a chunk that starts later than the first launch sees only the keys of its own rows"

    def __init__(self, correct: Provider | None = None) -> None:
        super().__init__(correct)
        self.starts: dict[RequestKey, int] = {}

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call, wrongly for a request that starts later than it did at first."""
        start = starts(call)
        first = [self.starts.setdefault(*pair) for pair in zip(requests(call), start.tolist(), strict=True)]
        own = np.where(start > first, start, 0)
        call = keep(call, lambda ids, row, family: ids[ids >= own[row] // family.ratio])
        return self.right(call, execution)


def requests(call: AttentionCall) -> list[RequestKey]:
    """Return the request of each row."""
    return [row.request for row in call.rows.ids]


def starts(call: AttentionCall) -> Array:
    """Return int64 `[T]`, the first position of each row's request in the call."""
    first = np.full(len(call.rows.requests), np.iinfo(np.int64).max)
    np.minimum.at(first, call.rows.request, call.rows.positions)
    return first[call.rows.request]
