"""Fault: the LSE is in base 2 and said to be natural.

After SGLang #40903, vLLM #47079 and FlashInfer #2113 (partial results merged in the wrong base).
"""

import numpy as np

from tracekit.controls.base import Twin
from tracekit.model import AttentionCall, Bits, DType
from tracekit.providers.base import Execution, Tensors


class BaseTwo(Twin):
    """A kernel whose LSE is in base 2."""

    id = "twin-base-two"
    fault = "the LSE is a logarithm to the base 2"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call with the LSE divided by ln 2."""
        right = self.right(call, execution)
        assert right.lse is not None
        scaled = right.lse.to_float32() / np.float32(np.log(2.0))
        return Tensors(right.out, Bits.from_float32(scaled, DType.FLOAT32))
