"""Fault: every partial counts the sink.

After ROCm/rocm-libraries #12227 (#12229): scores .5 and 2 and a sink of 1 give O times .624, not .769.
"""

import numpy as np

from tracekit.controls.ranks import SplitTwin
from tracekit.model import Array, Bits, DType
from tracekit.providers import tka1
from tracekit.providers.ranks import Arrived, merge_by_key


class SinkInEveryPartial(SplitTwin):
    """A job that applies the sink once a partial."""

    id = "twin-partial-sinks"
    fault = "every partial counts the sink"

    def merge(self, arrived: Arrived, sink: Array | None, dtype: DType) -> tka1.Outputs:
        """Merge with the sink raised by the logarithm of the number of partials."""
        if sink is not None:
            raised = Bits(sink, DType.FLOAT32).to_float32() + np.float32(np.log(len(arrived)))
            sink = Bits.from_float32(raised, DType.FLOAT32).data
        return merge_by_key(arrived, sink, dtype)
