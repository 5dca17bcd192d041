"""Fault: the sink is counted twice.

After ROCm/rocm-libraries #12227 (a sink on two partial results, or on one and on their merge).
"""

from dataclasses import replace

import numpy as np

from tracekit.controls.base import Twin
from tracekit.model import AttentionCall, Bits, DType
from tracekit.providers.base import Execution, Tensors


class SinkTwice(Twin):
    """A kernel that counts the sink twice."""

    id = "twin-sink-twice"
    fault = "the sink joins the denominator twice"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call with the sink raised by ln 2."""
        if call.sink is not None:
            raised = call.sink.to_float32() + np.float32(np.log(2.0))
            call = replace(call, sink=Bits.from_float32(raised, DType.FLOAT32))
        return self.right(call, execution)
