"""Fault: one partial is merged twice, as when two ranks both hold a block."""

from tracekit.controls.ranks import SplitTwin
from tracekit.model import TKA1_REDUCTION, Array, DType
from tracekit.providers import tka1
from tracekit.providers.partials import merge_blocks
from tracekit.providers.ranks import Arrived


class FirstPartialTwice(SplitTwin):
    """A job that merges one partial too many."""

    id = "twin-partial-twice"
    fault = "the first partial of several is merged twice"

    def merge(self, arrived: Arrived, sink: Array | None, dtype: DType) -> tka1.Outputs:
        """Merge the first once more behind the others."""
        again = arrived[:1] if len(arrived) > 1 else ()
        blocks = [*((run.key, part) for run, part in arrived), *((1 << 27, part) for _, part in again)]
        return merge_blocks(dict(blocks), TKA1_REDUCTION, sink, dtype)
