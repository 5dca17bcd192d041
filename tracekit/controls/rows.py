"""Fault: output slots are those of the first launch.

After vLLM #53821 (a replay that needs the row starts of its own launch and gets those of another) and the
general confusion of a row with its place in the batch.
"""

from collections.abc import Sequence

import numpy as np

from tracekit.controls.base import Twin
from tracekit.model import AttentionCall, RowId
from tracekit.providers.base import Execution, Provider, Tensors


class StaleSlots(Twin):
    """A kernel that writes rows to the slots of its first launch."""

    id = "twin-rows"
    fault = "rows are written to the slots that they had in the first launch"

    def __init__(self, correct: Provider | None = None) -> None:
        super().__init__(correct)
        self.slots: Sequence[RowId] = ()

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call; rows of the first launch go to their old slots."""
        right = self.right(call, execution)
        self.slots = self.slots or call.rows.ids
        if set(self.slots) == set(call.rows.ids):
            order = np.array([call.rows.ids.index(row) for row in self.slots])
            right = Tensors(right.out.take(order), right.lse and right.lse.take(order))
        return right
