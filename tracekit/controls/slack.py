"""Fault: rows of the null page are read with the weight zero, instead of not at all.

Right as long as that page holds numbers; 0 times NaN is NaN. After kernels that mask scores and then multiply
whole tiles of P and V.
"""

import numpy as np

from tracekit.controls.base import Twin
from tracekit.model import AttentionCall, Bits
from tracekit.providers.base import Execution, Tensors
from tracekit.providers.pages import write
from tracekit.providers.placement import NULL_PAGE, Placement


class WeightZero(Twin):
    """A kernel that adds the null page with the weight zero."""

    id = "twin-slack"
    fault = "the null page is added with the weight zero"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call; where the null page holds no numbers, O is none."""
        right = self.right(call, Execution(execution.threads))
        if execution.placement is None or not _spoils(call, execution.placement):
            return right
        return Tensors(Bits.from_float32(np.full(right.out.shape, np.nan, np.float32), call.dtype), right.lse)


def _spoils(call: AttentionCall, placement: Placement) -> bool:
    """Whether zero times a row of the null page is no zero."""
    for family in call.selection.families:
        paged = write(call, family, placement)
        for view in paged.layout.views(paged.cache):
            if view is not None and np.isnan(Bits(view[NULL_PAGE, 0].copy(), call.dtype).to_float32()).any():
                return True
    return False
