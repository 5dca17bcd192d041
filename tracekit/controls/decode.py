"""Fault: a one-token decode reads one key too few where the cache ends at its position.

After the off-by-one class of decode lengths: `seq_lens` before or after the new token.
"""

from tracekit.controls.base import Twin, keep
from tracekit.model import AttentionCall
from tracekit.providers.base import Execution, Tensors


class LengthOffByOne(Twin):
    """A kernel whose decode misses the newest key."""

    id = "twin-decode"
    fault = "a launch of one row whose KV ends at its position drops the newest key"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call, wrongly when it is a decode of one token."""
        end = max(rows.end * family.ratio for family, rows in call.kv[call.rows.requests[0]].items())
        if call.num_rows == 1 and end <= int(call.rows.positions[0]) + 1:
            call = keep(call, lambda ids, _row, _family: ids[:-1])
        return self.right(call, execution)
