"""Fault: rows are found by the page size of the first launch.

After kernels whose page size is fixed when they are compiled or captured, while the allocator has another.
"""

from dataclasses import replace

from tracekit.controls.base import Twin
from tracekit.controls.paged import misread, taken_for
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Tensors
from tracekit.providers.pages import Paged

CAPTURED = 48
"""No size of an engine, so that every page size is another one."""


class SizeOfFirstLaunch(Twin):
    """A kernel that was made for pages of 48 rows."""

    id = "twin-page-size"
    fault = "row i is looked for in page i // B at row i % B of the page size B of the first launch"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call over the rows that stand where they would with the first page size."""
        if execution.placement is not None:
            call = misread(call, execution.placement, in_first_size)
        return self.right(call, Execution(execution.threads))


def in_first_size(paged: Paged) -> Paged:
    """Return the same memory in pages of the first size."""
    return taken_for(paged, replace(paged.layout, page_size=CAPTURED))
