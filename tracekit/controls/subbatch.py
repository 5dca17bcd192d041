"""Fault: the split of the keys is planned for the batch size of the first launch.

After FlashInfer #4430 and #4647 (a plan made for another batch or bound decides the split).
"""

from tracekit.controls.base import Twin, without_oldest
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Provider, Tensors


class PlanOfFirstBatch(Twin):
    """A kernel whose plan was made for the size of its first batch."""

    id = "twin-subbatch"
    fault = "a launch of another size than the first drops the oldest key"

    def __init__(self, correct: Provider | None = None) -> None:
        super().__init__(correct)
        self.planned = 0

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call, wrongly when it has another size than the first."""
        self.planned = self.planned or call.num_rows
        if call.num_rows != self.planned:
            call = without_oldest(call)
        return self.right(call, execution)
