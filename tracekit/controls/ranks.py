"""What the twins of `splits`, `cp` and `tp` share: right in one process, and wrong where partials merge."""

from tracekit.controls.base import Twin
from tracekit.model import Array, AttentionCall, Bits, DType
from tracekit.providers import tka1
from tracekit.providers.base import Execution, Tensors
from tracekit.providers.portable import inputs
from tracekit.providers.ranks import Arrived, attention_of_ranks, merge_by_key


class SplitTwin(Twin):
    """TKA-1 as a job with one fault in `merge`, which gets partials in the order of their arrival."""

    id = "twin-split"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call, by ranks where it is split."""
        if execution.split is None:
            return self.right(call, execution)
        got = attention_of_ranks(inputs(call), call.rows.positions, execution.split, merge=self.merge)
        return Tensors(Bits(got.out, call.dtype), Bits(got.lse, DType.FLOAT32))

    def merge(self, arrived: Arrived, sink: Array | None, dtype: DType) -> tka1.Outputs:
        """Merge the partials of some rows; a subclass has its fault here."""
        return merge_by_key(arrived, sink, dtype)
