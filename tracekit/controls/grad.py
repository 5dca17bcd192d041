"""Fault: the forward that keeps gradients selects other keys.

After Megatron-LM #7169: a fused selection chose otherwise with gradients, so the ratio of PPO was not 1.
"""

from tracekit.controls.base import Twin, without_oldest
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Tensors


class OtherKeysInTraining(Twin):
    """A kernel that loses a key where gradients are wanted."""

    id = "twin-grad"
    fault = "a forward with gradients drops the oldest key"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call, wrongly where gradients are wanted."""
        return self.right(without_oldest(call) if execution.grad else call, execution)
