"""Fault: partials carry an LSE in base 2, and the merge takes it for nats.

After SGLang #40903, #33064, #35045, vLLM #47079 and FlashInfer #2113: with one partial nothing shows.
"""

import numpy as np

from tracekit.controls.ranks import SplitTwin
from tracekit.model import Array, DType
from tracekit.providers import tka1
from tracekit.providers.partials import of_lse, to_lse
from tracekit.providers.ranks import Arrived, merge_by_key


class BaseTwoPartials(SplitTwin):
    """A job whose partials have an LSE in base 2 that is merged as nats."""

    id = "twin-splits"
    fault = "the LSE of a partial is in base 2 and is merged as a natural one"

    def merge(self, arrived: Arrived, sink: Array | None, dtype: DType) -> tka1.Outputs:
        """Merge partials whose LSE was divided by ln 2."""
        parts = [(run, *to_lse(part)) for run, part in arrived]
        wrong = [(run, of_lse(out, lse / np.float32(np.log(2.0)))) for run, out, lse in parts]
        return merge_by_key(wrong, sink, dtype)
