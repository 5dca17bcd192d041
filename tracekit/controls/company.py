"""Fault: a row loses a key when another request of its launch has many rows.

After vLLM #51902 (the longest query of a launch chooses the tiles of every row). A second twin of `subbatch`:
a decode keeps its bits alone, in any order and beside other decodes.
"""

import numpy as np

from tracekit.controls.base import Twin, keep
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Tensors

THRESHOLD = 10


class LongCompany(Twin):
    """A kernel that treats rows otherwise beside a request of more than 10 rows."""

    id = "twin-company"
    fault = "a row beside another request of more than 10 rows drops the oldest key"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call, wrongly for rows with a long request beside them."""
        long = np.bincount(call.rows.request) > THRESHOLD
        beside = (long.sum() > long)[call.rows.request]
        call = keep(call, lambda ids, row, _family: ids[int(beside[row]) :])
        return self.right(call, execution)
