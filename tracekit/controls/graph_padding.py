"""Fault: slots behind the rows of a captured batch are never written.

After vLLM #37682: rows of padding kept what stood there, and NaN went on from them into the next layer.
"""

import numpy as np

from tracekit.controls.captured import CapturedTwin, Spoiled
from tracekit.model import AttentionCall


class _Short(Spoiled):
    def load(self, call: AttentionCall) -> None:
        """Launch no slot behind the last row that reads something."""
        super().load(call)
        self.buffers.rows = 1 + int(np.flatnonzero(call.selection.counts())[-1])


class SlotsUnwritten(CapturedTwin):
    """A kernel that launches the rows of a batch alone, and leaves the slots behind them."""

    id = "twin-host-graph-padding"
    fault = "slots behind the last row are not written"
    spoiled = _Short
