"""Fault: the last partial to arrive is not waited for."""

from tracekit.controls.ranks import SplitTwin
from tracekit.model import Array, DType
from tracekit.providers import tka1
from tracekit.providers.ranks import Arrived, merge_by_key


class LastPartialLost(SplitTwin):
    """A job that merges one partial too few."""

    id = "twin-partial-gap"
    fault = "the last partial of several is lost"

    def merge(self, arrived: Arrived, sink: Array | None, dtype: DType) -> tka1.Outputs:
        """Merge without the last."""
        return merge_by_key(arrived[: max(1, len(arrived) - 1)], sink, dtype)
