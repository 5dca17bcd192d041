"""Fault: the slots, heads and requests of a padded launch are counted as if nothing had been added.

After launches padded for a captured size or a fixed number of heads, whose answer is cut at the front: rows
that were padded on the left, and heads that were padded in each group, then belong to others. A request that
is counted so reads the KV of the one that stands in its place, and of an empty one nothing.
"""

from collections.abc import Sequence

from tracekit.controls.base import Twin, keep
from tracekit.controls.requests import held
from tracekit.model import AttentionCall, Bits, RequestKey
from tracekit.providers.base import Execution, Tensors
from tracekit.providers.padding import padded


class PaddingForgotten(Twin):
    """A kernel that takes the first slots, heads and requests of a padded launch for its own."""

    id = "twin-padding"
    fault = "the first slots, heads and requests of a padded launch are taken for its own"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call; a padded launch is counted, and cut, as it would be without padding."""
        if execution.placement is None:
            return self.right(call, execution)
        launch = padded(call, execution.placement)
        whole = self.right(over_first(launch, call.rows.requests), Execution(execution.threads))
        return Tensors(first(call, whole.out), whole.lse and first(call, whole.lse))


def over_first(launch: AttentionCall, own: Sequence[RequestKey]) -> AttentionCall:
    """Return a padded launch whose own request i reads the KV of its request i, and what that lacks not."""
    kv = dict(launch.kv) | {
        key: launch.kv[other] for key, other in zip(own, launch.rows.requests, strict=False)
    }
    of_row = [row.request for row in launch.rows.ids]
    return keep(launch, lambda ids, t, family: held(ids, kv[of_row[t]][family])).with_kv(kv)


def first(call: AttentionCall, bits: Bits) -> Bits:
    """Return the first `[T, H]` of an answer."""
    return Bits(bits.data[: call.num_rows, : call.num_heads], bits.dtype)
