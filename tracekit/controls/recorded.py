"""Fault: the kernel has drifted since the recording: it clears the last bit of O.

After any change of a library that rounds elsewhere (RL-Kernel's early downcast and final write dtype).
"""

from tracekit.controls.base import Twin
from tracekit.model import AttentionCall, Bits
from tracekit.providers.base import Execution, Tensors


class RoundingDrift(Twin):
    """A kernel whose last bit has drifted."""

    id = "twin-recorded"
    fault = "the last bit of O is cleared"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call with an even O."""
        right = self.right(call, execution)
        return Tensors(Bits(right.out.data & ~right.out.data.dtype.type(1), call.dtype), right.lse)
