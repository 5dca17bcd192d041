"""Fault: gradients of KV are accumulated in bfloat16, as rows arrive.

After RL-Kernel's probe `accum_dtype`, in a backward: a tolerance of bfloat16 hides it.
"""

from dataclasses import replace

import numpy as np

from tracekit.controls.base import Twin
from tracekit.model import AttentionCall, Bits, DType, Gradients, KVFamily, KVRows, RequestKey
from tracekit.providers.base import Execution, Launch, Tensors


class Bfloat16Sums(Twin):
    """A kernel that keeps dK and dV in bfloat16 and adds row after row."""

    id = "twin-backward-short"
    fault = "dK and dV are accumulated in bfloat16 in the order of the rows of the batch"

    def answer(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call, its gradients of KV summed over launches of one row."""
        right = self.right(call, execution)
        if right.grads is None:
            return right
        rows = [self._row(call, t, execution) for t in range(call.num_rows)]
        return replace(right, grads=replace(right.grads, d_kv=_in_bfloat16(right.grads, rows)))

    def _row(self, call: AttentionCall, t: int, execution: Execution) -> Gradients:
        assert call.grads is not None
        alone = replace(call.take(np.array([t])), grads=Gradients(call.grads.d_out.take(np.array([t]))))
        grads = self.correct.run(Launch((alone,), execution)).tensors[0].grads
        assert grads is not None
        return grads


def _in_bfloat16(whole: Gradients, rows: list[Gradients]) -> dict[RequestKey, dict[KVFamily, KVRows]]:
    """The gradients of KV of each request as a running sum over its rows, rounded after each."""
    sums: dict[RequestKey, dict[KVFamily, KVRows]] = {}
    for key, families in whole.d_kv.items():
        sums[key] = {}
        for family, like in families.items():
            parts = [row.d_kv[key][family] for row in rows if key in row.d_kv]
            keys = _sum([part.keys for part in parts])
            values = None if like.shared else _sum([part.value_bits for part in parts])
            sums[key][family] = KVRows(keys, values, like.first, like.generation)
    return sums


def _sum(parts: list[Bits]) -> Bits:
    total = np.zeros(parts[0].shape, np.float32)
    for part in parts:
        total = Bits.from_float32(total + part.to_float32(), DType.BFLOAT16).to_float32()
    return Bits.from_float32(total, DType.FLOAT32)
