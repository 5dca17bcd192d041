"""Fault: the slots of a padded launch are taken for those of one without padding.

After launches padded for a captured size or a fixed number of heads, whose answer is cut at the front: rows
that were padded on the left, and heads that were padded in each group, then belong to others.
"""

from tracekit.controls.base import Twin
from tracekit.model import AttentionCall, Bits
from tracekit.providers.base import Execution, Tensors
from tracekit.providers.padding import padded


class PaddingForgotten(Twin):
    """A kernel that takes the first slots and the first heads of a padded launch for its rows and heads."""

    id = "twin-padding"
    fault = "the first slots and heads of a padded launch are taken for its rows and heads"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call; a padded launch is cut to the size that it would have without padding."""
        if execution.placement is None:
            return self.right(call, execution)
        whole = self.right(padded(call, execution.placement), Execution(execution.threads))
        return Tensors(first(call, whole.out), whole.lse and first(call, whole.lse))


def first(call: AttentionCall, bits: Bits) -> Bits:
    """Return the first `[T, H]` of an answer."""
    return Bits(bits.data[: call.num_rows, : call.num_heads], bits.dtype)
