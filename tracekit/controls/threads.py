"""Fault: there is room for the partial results of as many threads as the first launch had.

After FlashInfer #4430 and ROCm/rocm-libraries #12227 (a partial result that is not written, or not merged).
"""

from tracekit.controls.base import Twin, keep
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Provider, Tensors


class PlannedThreads(Twin):
    """A kernel with room for the threads of its first launch only."""

    id = "twin-threads"
    fault = "with another number of threads than at first, the last thread's range of keys is lost"

    def __init__(self, correct: Provider | None = None) -> None:
        super().__init__(correct)
        self.planned = -1

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call, each thread summing one range of the keys."""
        self.planned = execution.threads if self.planned < 0 else self.planned
        if (threads := execution.threads) not in (self.planned, 1):
            call = keep(call, lambda ids, _row, _family: ids[: ids.size - -(-ids.size // threads)])
        return self.right(call, execution)
