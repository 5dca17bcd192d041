"""Fault: the kernel has drifted since the recording: the last bits of its answer are others.

After any change of a library that rounds elsewhere (RL-Kernel's early downcast and final write dtype). The
twin is the judged kernel itself: it takes the answer that was judged and flips the last bit of each number,
so that what must be refuted is a comparison with the trace.
"""

from tracekit.controls.base import Twin
from tracekit.model import AttentionCall, Bits
from tracekit.providers.base import Execution, Provider, Tensors
from tracekit.providers.recorded_answer import RecordedAnswer


class RoundingDrift(Twin):
    """A kernel whose last bit has drifted; asked about a call that holds the answer of the judged kernel."""

    id = "twin-recorded"
    fault = "the last bit of O and of the LSE is flipped"

    def __init__(self, correct: Provider | None = None) -> None:
        super().__init__(correct or RecordedAnswer())

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call with the last bits flipped."""
        right = self.right(call, execution)
        return Tensors(flipped(right.out), right.lse and flipped(right.lse))


def flipped(bits: Bits) -> Bits:
    """Return a tensor with the last bit of each number flipped."""
    return Bits(bits.data ^ bits.data.dtype.type(1), bits.dtype)
