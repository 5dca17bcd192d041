"""DeepSeek-V4 in vLLM on the CPU: what is wrapped.

Its layers have no implementation object: `forward_mqa` turns the indexer's choice into slots of two paged
caches and calls `_C::flash_mla_with_kvcache_cpu`; before it, the indexer of a layer calls two operators of
its own. The recorder stands before all of these. The layer says whose launch it is, the operators' own
arguments say what was read.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from tracekit.engines.patch import Entry
from tracekit.engines.vllm_dsv4_call import OperatorCall, observe_launch
from tracekit.engines.vllm_dsv4_indexer import SCORES, TOP_K, IndexerRun, observe_indexers
from tracekit.engines.vllm_step import Step
from tracekit.errors import Unsupported
from tracekit.providers.vllm_dsv4 import OPERATOR
from tracekit.recorder.observation import IndexerObservation, Observation


class Looks(Protocol):
    """Who records; nothing that happens in these methods reaches the engine."""

    def look(self, name: str, observe: Callable[[Step], Observation], launches: int = 1) -> None:
        """Record a launch of a layer that has run; each layer of the step launches so often."""
        ...

    def look_indexers(self, name: str, observe: Callable[[Step], Iterable[IndexerObservation]]) -> None:
        """Record the launches of the indexer of a layer, after the layer's own."""
        ...

    def profiled(self) -> None:
        """Count a call over tokens that nobody sent."""
        ...


class Seen:
    """The operators that ran since the last layer."""

    def __init__(self) -> None:
        self.launches: list[OperatorCall] = []
        self.indexers: list[IndexerRun] = []

    def clear(self) -> None:
        """Begin with the next layer."""
        self.launches, self.indexers = [], []

    def attention(self, original: Any) -> Any:
        """Stand before the attention operator."""

        def flash_mla(*arguments: Any) -> None:
            original(*arguments)
            self.launches.append(OperatorCall(*arguments))

        return flash_mla

    def scores(self, original: Any) -> Any:
        """Stand before the operator that gives each row's scores."""

        def paged_logits(*arguments: Any) -> Any:
            scores = original(*arguments)
            self.indexers.append(IndexerRun(*(*arguments, scores)))
            return scores

        return paged_logits

    def top_k(self, original: Any) -> Any:
        """Stand before the operator that chooses among them; its last argument is filled."""

        def transform(*arguments: Any) -> None:
            original(*arguments)
            if self.indexers:
                self.indexers[-1].chosen = arguments[-1]

        return transform


def v4_entries(layers: Mapping[str, Any], recorder: Looks) -> list[Entry]:
    """Return what is wrapped of the layers of a model, and the operators beneath them.

    Args:
        layers: vLLM's `DeepseekV4CPUAttention` by name.
        recorder: gets what is seen.
    """
    if not layers:
        return []
    seen = Seen()
    space, entries = torch.ops._C, []
    for operator, wrap in ((OPERATOR, seen.attention), (SCORES, seen.scores), (TOP_K, seen.top_k)):
        getattr(space, operator)  # looked up once, so that there is an original to come back
        entries.append(Entry(operator, vars(space), operator, wrap))
    return entries + [
        Entry(name, vars(layer), "forward_mqa", _wrapped(name, layer, seen, recorder))
        for name, layer in layers.items()
    ]


def _wrapped(name: str, layer: Any, seen: Seen, recorder: Looks) -> Callable[[Any], Any]:
    original = layer.forward_mqa

    def forward_mqa(q: Any, kv: Any, positions: Any, output: Any) -> None:
        try:
            original(q, kv, positions, output)
            metadata, indexers = _metadata(), seen.indexers
            if isinstance(metadata, dict):
                launches = seen.launches
                recorder.look(
                    name, lambda step: observe_launch(name, layer, _only(name, launches), metadata, step)
                )
                if layer.indexer is not None:
                    recorder.look_indexers(name, lambda step: observe_indexers(name, layer, indexers, step))
            else:  # a profiling run, over tokens that nobody sent
                recorder.profiled()
        finally:
            seen.clear()

    return lambda _: forward_mqa


def _metadata() -> Any:
    from vllm.forward_context import get_forward_context

    return get_forward_context().attn_metadata


def _only(name: str, launches: list[OperatorCall]) -> OperatorCall:
    if len(launches) != 1:
        raise Unsupported(
            f"layer {name} launched {OPERATOR} {len(launches)} times where once was expected; this vLLM is "
            "not what the recorder was made for. Install a tested version (docs/engines.md).",
            rule="V-HOOK",
            layer=name,
        )
    return launches[0]
