"""Fault: gradients of KV and sink are added in the order in which query rows arrive.

After every backward with atomic additions: the sum is right to the last bits, which change with the batch.
"""

from dataclasses import replace

import numpy as np

from tracekit.controls.base import Twin
from tracekit.model import AttentionCall
from tracekit.providers import tka1
from tracekit.providers.base import Execution, Tensors
from tracekit.providers.portable import backward_of, gradients_of


class SumsInArrival(Twin):
    """TKA-1 with sums over queries in the order of the batch."""

    id = "twin-backward"
    fault = "gradients are added in the order of the rows of the batch"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call; the place of a row stands for its position."""
        right = self.right(call, execution)
        if call.grads is None or not execution.grad:
            return right
        launch = replace(backward_of(call, call.grads.d_out), positions=np.arange(call.num_rows))
        return replace(right, grads=gradients_of(call, call.grads.d_out, tka1.backward(launch)))
