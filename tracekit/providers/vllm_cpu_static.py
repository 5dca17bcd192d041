"""A launch of vLLM's CPU operator over tensors that stay where they are (graphs/base.py).

What vLLM computes on the host for each step, its plan included, is computed when a call is loaded and written
in place; the operator alone is captured.
"""

from collections.abc import Sequence

import torch

from tracekit.errors import Unsupported
from tracekit.model import AttentionCall, Bits, ExecutedIdentity
from tracekit.providers.base import Tensors
from tracekit.providers.graphs.tensors import TensorLaunch, room
from tracekit.providers.torch_tensors import to_torch
from tracekit.providers.vllm_cpu_attend import launch, planned_by_vllm, queries, sink_of
from tracekit.providers.vllm_cpu_cache import build_cache, kind_of
from tracekit.providers.vllm_cpu_launch import (
    Geometry,
    fresh,
    live_part,
    more_sequences,
    padded,
    page_size_of,
)


class StaticAttention(TensorLaunch):
    """One launch with room for several calls.

    Args:
        calls: those calls; fresh launches, without plans.
        isa: the code path.
        split: whether keys may be split.
        threads: for plan and launch alike.
        executed: what runs.

    Raises:
        Unsupported: `P-GRAPH`, the calls differ in what is passed by value.
    """

    def __init__(
        self, calls: Sequence[AttentionCall], isa: str, split: bool, threads: int, executed: ExecutedIdentity
    ) -> None:
        self.call, self.isa, self.split, self.threads, self.ran = calls[0], isa, split, threads, executed
        if len({_by_value(call) for call in calls}) != 1:
            raise Unsupported(
                "a captured launch keeps rows, heads, pages, dtype, scale and window; these calls differ.",
                rule="P-GRAPH",
            )
        self.before = torch.get_num_threads()
        batches = [_batch(call) for call in calls]
        self.sequences = max(at.seq_lens.size for at in batches)
        self.pages = max(at.tables.shape[1] for at in batches)
        made = [self._tensors(call) for call in calls]
        inputs = {name: room([tensors[name] for tensors in made]) for name in made[0]}
        super().__init__(inputs, torch.zeros_like(inputs["queries"]), calls[0].dtype)

    def load(self, call: AttentionCall) -> None:
        """Write a call, and the plan that vLLM makes for it; torch's threads are set until `read`."""
        tensors = self._tensors(call)
        tensors["the plan"] = moved(tensors["the plan"], self.inputs["the plan"].data_ptr())
        self.write(tensors)
        self.slots = _batch(call).row_slots

    def enqueue(self) -> None:
        """Call the operator."""
        at = self.inputs
        keys, values = at["the KV cache"].chunk(2, dim=2)
        launch(
            self.call,
            kind_of(self.call, None),
            {},
            at["queries"],
            keys,
            values,
            self.out,
            at["starts"],
            at["lengths"],
            at["tables"],
            at["the plan"],
            at.get("the sink"),
        )

    def read(self) -> Tensors:
        """Return a copy of O, and give the threads back."""
        torch.set_num_threads(self.before)
        return super().read()

    def executed(self) -> ExecutedIdentity:
        """As an eager launch."""
        return self.ran

    def _tensors(self, call: AttentionCall) -> dict[str, torch.Tensor]:
        at, kind = more_sequences(_batch(call), self.sequences, self.pages), kind_of(call, None)
        live = live_part(call)
        made = {
            "queries": to_torch(Bits(queries(call, at), call.dtype)),
            "the KV cache": build_cache(live, at, self.isa, kind, None),
            "starts": torch.from_numpy(at.starts),
            "lengths": torch.from_numpy(at.seq_lens),
            "tables": torch.from_numpy(at.tables),
        }
        torch.set_num_threads(self.threads)
        made["the plan"] = planned_by_vllm(
            call, made["lengths"], made["starts"], self.isa, kind, self.split, {}
        )
        sink = sink_of(call, {})
        return made if sink is None else made | {"the sink": sink}


def moved(plan: torch.Tensor, to: int) -> torch.Tensor:
    """Return a plan of vLLM as it must stand at another address.

    It holds addresses of its own work items. A plain copy goes on reading the memory of the original, which
    ends the process once that is gone (docs/findings.md).
    """
    copy = plan.clone()
    words = copy[: copy.numel() // 8 * 8].view(torch.int64)
    inside = (words >= plan.data_ptr()) & (words <= plan.data_ptr() + plan.numel())
    words[inside] += to - plan.data_ptr()
    return copy


def _batch(call: AttentionCall) -> Geometry:
    return padded(call, fresh(live_part(call), page_size_of(call)))


def _by_value(call: AttentionCall) -> tuple[object, ...]:
    means = call.conventions
    shape = (call.q.shape, call.num_kv_heads, page_size_of(call), call.dtype, call.sink is None)
    return (*shape, means.scale_bits, means.window, kind_of(call, None))
