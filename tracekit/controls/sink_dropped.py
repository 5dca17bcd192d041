"""Fault: the sink is not applied.

After ROCm/rocm-libraries #12227 (a split of the keys that leaves the sink out).
"""

from dataclasses import replace

from tracekit.controls.base import Twin
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Tensors


class SinkDropped(Twin):
    """A kernel that leaves the sink out."""

    id = "twin-sink-dropped"
    fault = "the sink is left out of the denominator"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call without its sink."""
        return self.right(replace(call, sink=None), execution)
