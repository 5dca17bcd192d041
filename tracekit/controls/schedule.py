"""Fault: sums are cut where the schedule cuts the work, and partial results are rounded before they meet.

After split counts that a host picks (FlashInfer #4647, SGLang #26412), and RL-Kernel's probe
`early_downcast`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tracekit.controls.base import Twin, keep
from tracekit.model import AttentionCall, Bits, DType
from tracekit.providers.base import Answer, Execution, Launch, Tensors


class CutWhereScheduled(Twin):
    """A kernel that sums the keys of a row in two pieces when it is given a schedule."""

    id = "twin-schedule"
    fault = "sums are cut where the schedule cuts the work, and partial results are rounded"

    def run(self, launch: Launch) -> Answer:
        """Answer the calls, and say truly in which schedule."""
        return replace(super().run(launch), schedule=launch.execution.schedule or "as usual")

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call; with a schedule from the two halves of each row's keys."""
        if execution.schedule is None:
            return self.right(call, execution)
        first = keep(replace(call, sink=None), lambda ids, _row, _family: ids[: ids.size // 2])
        second = keep(replace(call, sink=None), lambda ids, _row, _family: ids[ids.size // 2 :])
        halves = [self.right(part, Execution(execution.threads)) for part in (first, second)]
        return merged(call, halves)


def merged(call: AttentionCall, parts: Sequence[Tensors]) -> Tensors:
    """Merge answers over parts of the keys by their LSE; the sink counts once."""
    lse = np.stack([part.lse.to_float32() for part in parts if part.lse is not None])
    total = np.logaddexp.reduce(lse, axis=0)
    end = total if call.sink is None else np.logaddexp(total, call.sink.to_float32())
    weight = np.exp(lse - np.where(np.isneginf(end), 0, end))
    out = np.sum(
        [w[..., None] * part.out.to_float32() for w, part in zip(weight, parts, strict=True)], axis=0
    )
    return Tensors(
        Bits.from_float32(out.astype(np.float32), call.dtype), Bits.from_float32(total, DType.FLOAT32)
    )
