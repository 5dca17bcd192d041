"""Fault: one row is a case of its own, and that case loses the oldest key.

After vLLM #51902 (a row's tiles change with its company) and RL-Kernel #319 (bits that depend on the batch).
"""

from tracekit.controls.base import Twin, without_oldest
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Tensors


class SmallBatchKernel(Twin):
    """A kernel that is another one for one row."""

    id = "twin-solo"
    fault = "a launch of one row drops the oldest key"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call, wrongly when it has one row."""
        if call.num_rows == 1:
            call = without_oldest(call)
        return self.right(call, execution)
