"""Fault: partials merge one after the other, in the order in which they arrive.

A merge in binary32 is not associative, so the answer depends on which rank is quick. Two partials hide it:
they commute.
"""

from dataclasses import replace

from tracekit.controls.ranks import SplitTwin
from tracekit.model import TKA1_REDUCTION, Array, DType, Tree
from tracekit.providers import tka1
from tracekit.providers.partials import merge_blocks
from tracekit.providers.ranks import Arrived


class MergeInArrival(SplitTwin):
    """A job that merges as partials come."""

    id = "twin-partial-arrival"
    fault = "partials merge in the order of their arrival"

    def merge(self, arrived: Arrived, sink: Array | None, dtype: DType) -> tka1.Outputs:
        """Merge by the number of arrival."""
        spec = replace(TKA1_REDUCTION, tree=Tree.LEFT_FOLD)
        return merge_blocks({i: part for i, (_, part) in enumerate(arrived)}, spec, sink, dtype)
