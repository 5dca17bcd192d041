"""Fault: a launch plans its work for the rows of the launch before it.

After workspaces that are sized once and kept: what does not fit is left out (FlashInfer #4430).
"""

from tracekit.controls.base import Twin, without_oldest
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Provider, Tensors


class RoomOfLastLaunch(Twin):
    """A kernel whose rows lose their oldest key where the launch before had another number of rows."""

    id = "twin-after"
    fault = "the work is planned for the rows of the launch before"

    def __init__(self, correct: Provider | None = None) -> None:
        super().__init__(correct)
        self.rows = -1

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call by the plan of the last."""
        fits = self.rows in (-1, call.num_rows)
        self.rows = call.num_rows
        return self.right(call if fits else without_oldest(call), execution)
