"""`flash-mla`: DeepSeek's FlashMLA, sparse prefill: one KV head whose first 512 columns are the values.

Written against deepseek-ai/FlashMLA 9241ae3 of 2026-04-29, `flash_mla_sparse_fwd`: rows of all families and
requests lie in one KV tensor, each query names those that it reads, -1 is none. LSE natural, `[T, H]`,
without the sink, +inf for a row without keys; the sink scales O alone. Its documentation promises nothing
about bits, so nothing is advertised. Not run on hardware yet.
"""

import numpy as np
import torch

from tracekit.model import AttentionCall, DType, KVFamily
from tracekit.providers.base import Capabilities, Tensors, refusal
from tracekit.providers.gpu_batch import answer, sink_of
from tracekit.providers.gpu_kernel import GpuKernel, load
from tracekit.providers.torch_tensors import over, to_torch

ARGUMENTS = ("q", "kv", "indices", "sm_scale", "d_v", "attn_sink")
HEADS = (64, 128)
WIDTHS = (512, 576)
VALUES = 512
_BLOCK = 128
"""Places of a list are a multiple of it: the widest block of keys that a kernel there walks."""


class FlashMla(GpuKernel):
    """`flash_mla_sparse_fwd`."""

    id = "flash-mla"
    kernel = "flash_mla.sparse_fwd"
    distribution = "flash_mla"
    dtypes = frozenset({DType.BFLOAT16})
    sink = True

    def _load(self) -> None:
        self._function = load(type(self), "flash_mla:flash_mla_sparse_fwd", ARGUMENTS)

    def capabilities(self) -> Capabilities:
        """Lists over one or two families whose keys are their values; sinks."""
        return Capabilities(
            dtypes=self.dtypes,
            families=frozenset(KVFamily) - {KVFamily.INDEX},
            two_families=True,
            lists=True,
            sink=True,
            max_head_dim=max(WIDTHS),
            probability_dtype={DType.BFLOAT16: DType.BFLOAT16},
            launch_plan=False,
        )

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why it cannot run a call."""
        if reason := refusal(self.capabilities(), call):
            return reason
        if call.num_kv_heads != 1 or call.num_heads not in HEADS:
            return f"it takes 64 or 128 heads on one KV head, not {call.num_heads} on {call.num_kv_heads}"
        if call.head_dim not in WIDTHS or call.value_dim != VALUES or not _values_are_keys(call):
            return f"it takes keys of 512 or 576 whose first {VALUES} columns are the values"
        return None

    def _run(self, call: AttentionCall) -> Tensors:
        rows, starts, at = [], {}, 0
        for request, key in enumerate(call.rows.requests):
            for family in call.selection.families:
                held = call.kv[key][family]
                starts[request, family] = at - held.first
                rows.append(held.keys.data)
                at += held.count
        seen = []
        for t, request in enumerate(call.rows.request.tolist()):
            parts = [ids + starts[request, family] for family, ids in call.selection.row(t)]
            seen.append(np.concatenate(parts))
        places = -(-max(1, *(ids.size for ids in seen)) // _BLOCK) * _BLOCK
        indices = np.full((call.num_rows, 1, places), -1, np.int32)
        for t, ids in enumerate(seen):
            indices[t, 0, : ids.size] = ids
        out, _, lse = self._function(
            to_torch(call.q).to(self.device),
            over(np.ascontiguousarray(np.concatenate(rows)), call.dtype).to(self.device),
            torch.from_numpy(indices).to(self.device),
            call.conventions.scale,
            d_v=VALUES,
            attn_sink=sink_of(call, self.device),
        )
        return answer(call, out, lse)


def _values_are_keys(call: AttentionCall) -> bool:
    held = (call.kv[key][family] for key in call.rows.requests for family in call.selection.families)
    return all(one.shared or np.array_equal(one.value_bits.data, one.keys.data[..., :VALUES]) for one in held)
