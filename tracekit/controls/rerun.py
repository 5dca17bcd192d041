"""Fault: the accumulators are not cleared between launches.

After vLLM #46386 (a replay that now and then gives other numbers) and kernels that read a workspace which
nobody has written in this launch.
"""

import numpy as np

from tracekit.controls.base import Twin
from tracekit.model import AttentionCall, Bits
from tracekit.providers.base import Execution, Provider, Tensors


class StateLeftOver(Twin):
    """A kernel that keeps state of its last launch."""

    id = "twin-rerun"
    fault = "every launch after the first starts from what the last one left"

    def __init__(self, correct: Provider | None = None) -> None:
        super().__init__(correct)
        self.launches = 0

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call, counting what was summed before once more."""
        right = self.right(call, execution)
        self.launches += 1
        factor = np.float32(self.launches)
        return Tensors(Bits.from_float32(right.out.to_float32() * factor, call.dtype), right.lse)
