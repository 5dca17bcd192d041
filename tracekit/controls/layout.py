"""Fault: a cache is read in the layout of the first launch.

After mistaken layouts between allocator and kernel (HND for NHD, keys transposed or not): every read lies
inside the cache and every number looks like one.
"""

from dataclasses import replace

from tracekit.canonical.page_layout import Order, Place
from tracekit.controls.base import Twin
from tracekit.controls.paged import misread, taken_for
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Tensors
from tracekit.providers.pages import Paged


class LayoutOfFirstLaunch(Twin):
    """A kernel that takes each page for the rows of one token after the other, key then value."""

    id = "twin-layout"
    fault = "pages of every layout are read as rows of a key and its value, NHD"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call over its cache as the first layout has it."""
        if execution.placement is not None:
            call = misread(call, execution.placement, as_rows)
        return self.right(call, Execution(execution.threads))


def as_rows(paged: Paged) -> Paged:
    """Return the same memory as joined NHD rows; as NHD rows alone where keys and values are one tensor."""
    place = Place.SHARED if paged.layout.place is Place.SHARED else Place.JOINED
    layout = replace(paged.layout, place=place, order=Order.NHD, kv_axis=None, keys_transposed=False)
    return taken_for(paged, layout)
