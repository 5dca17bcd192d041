"""Fault: the heads of the ranks are put together in the order in which the ranks end.

After RL-Kernel's probe `tp_head_ownership`: each head is right, and stands in the place of another.
"""

import numpy as np

from tracekit.controls.base import Twin
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Tensors


class RanksOutOfOrder(Twin):
    """A job whose ranks are gathered from the last to the first."""

    id = "twin-tp"
    fault = "the heads of tensor ranks are gathered in another order than that of the ranks"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call with the ranks' heads reversed."""
        right = self.right(call, execution)
        ranks = 1 if execution.split is None else execution.split.tensor
        order = np.arange(call.num_heads).reshape(ranks, -1)[::-1].ravel()
        return Tensors(
            right.out.part((slice(None), order)), right.lse and right.lse.part((slice(None), order))
        )
