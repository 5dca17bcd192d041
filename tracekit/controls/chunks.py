"""Fault: a later chunk sees only its own rows.

After hw-native-sys/pypto-lib #592 (from the second chunk on, rows of the first chunk are not scored).
"""

from tracekit.controls.base import Twin, keep
from tracekit.model import AttentionCall, RequestKey
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
        starts = [
            int(call.rows.positions[call.rows.request == i].min()) for i in range(len(call.rows.requests))
        ]
        first = [self.starts.setdefault(*pair) for pair in zip(call.rows.requests, starts, strict=True)]
        if starts != first:
            of = [starts[i] if starts[i] > first[i] else 0 for i in call.rows.request]
            call = keep(call, lambda ids, row, family: ids[ids >= of[row] // family.ratio])
        return self.right(call, execution)
