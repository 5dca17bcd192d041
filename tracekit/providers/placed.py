"""Run a launch that lies somewhere, on a kernel that takes logical rows: through pages, with padding."""

from collections.abc import Callable

from tracekit.model import AttentionCall
from tracekit.providers.base import Tensors
from tracekit.providers.padding import padded, without_padding
from tracekit.providers.pages import through_pages
from tracekit.providers.placement import Placement

PAGE_SIZES = (1, 16, 32, 64, 128, 256)
"""The canonicaliser takes any size; these are the sizes of engines, and 1, a token pool."""


def run_placed(
    run: Callable[[AttentionCall], Tensors], call: AttentionCall, placement: Placement | None
) -> Tensors:
    """Run a call over the rows that its pages hold, with padding around it.

    Args:
        run: the kernel.
        call: the call.
        placement: where it lies; None runs it as it stands.
    """
    if placement is None:
        return run(call)
    return without_padding(run(padded(through_pages(call, placement), placement)), call, placement)
