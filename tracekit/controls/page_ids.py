"""Fault: pages are found by the block table of the first launch.

After stale block tables in captured graphs: a replay reads the table that stood there at capture.
"""

from dataclasses import replace

import numpy as np

from tracekit.controls.base import Twin
from tracekit.controls.paged import misread
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Tensors
from tracekit.providers.pages import Paged


class StaleTable(Twin):
    """A kernel that reads by the table of its first launch: pages in the order of requests, from 0 on."""

    id = "twin-page-ids"
    fault = "pages are found by the block table of the first launch"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call over the pages that held its rows at first."""
        if execution.placement is not None:
            call = misread(call, execution.placement, stale)
        return self.right(call, Execution(execution.threads))


def stale(paged: Paged) -> Paged:
    """Return a cache with the tables of a launch whose pages are numbered from 0 in the order of requests."""
    ends = np.cumsum([table.size for table in paged.tables])
    names = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1])
    return replace(paged, tables=tuple(names))
