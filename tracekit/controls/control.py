"""Fault: the scale is applied twice, to Q and to the scores.

After RL-Kernel's probe `scale_placement`. Wrong in O and in the LSE, on any call whose scores vary.
"""

from dataclasses import replace

from tracekit.controls.base import Twin
from tracekit.model import AttentionCall, scale_to_bits
from tracekit.providers.base import Execution, Tensors


class ScaleTwice(Twin):
    """A kernel that applies the scale twice."""

    id = "twin-control"
    fault = "scores carry the scale twice"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call with scale², wrong and stable."""
        twice = scale_to_bits(call.conventions.scale**2)
        return self.right(replace(call, conventions=replace(call.conventions, scale_bits=twice)), execution)
