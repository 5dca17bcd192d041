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

    @property
    def running(self) -> bool:
        """Whether a step of the engine runs that is recorded."""
        ...

    def look(
        self, name: str, observe: Callable[[Step], Observation], launches: Callable[[], int] = ...
    ) -> None:
        """Record a launch of a layer that has run; each layer of the step launches so often."""
        ...

    def look_indexers(self, name: str, observe: Callable[[Step], Iterable[IndexerObservation]]) -> None:
        """Record the launches of the indexer of a layer, after the layer's own."""
        ...


Ran = tuple[tuple[Any, ...], Any]
"""The arguments of an operator that ran, and what it gave."""


class Seen:
    """The operators that ran since the last layer of one engine.

    Operators belong to the process. What runs while no step of this engine does is another engine's, and
    is let go at once. Arguments are kept as they came: an operator that has changed breaks its reading.

    Args:
        recorder: whose engine it is.
    """

    def __init__(self, recorder: Looks) -> None:
        self._recorder = recorder
        self.ran: dict[str, list[Ran]] = {}

    def clear(self) -> None:
        """Begin with the next layer."""
        self.ran = {}

    def before(self, operator: str) -> Callable[[Any], Any]:
        """Return what makes the function that stands before an operator."""

        def make(original: Any) -> Any:
            def watched(*arguments: Any, **more: Any) -> Any:
                answer = original(*arguments, **more)
                if self._recorder.running:
                    self.ran.setdefault(operator, []).append(((*arguments, *more.values()), answer))
                return answer

            return watched

        return make


def v4_entries(layers: Mapping[str, Any], recorder: Looks) -> list[Entry]:
    """Return what is wrapped of the layers of a model, and the operators beneath them.

    Args:
        layers: vLLM's `DeepseekV4CPUAttention` by name.
        recorder: gets what is seen.
    """
    if not layers:
        return []
    seen = Seen(recorder)
    space, entries = torch.ops._C, []
    for operator in (OPERATOR, SCORES, TOP_K):
        getattr(space, operator)  # looked up once, so that there is an original to come back
        entries.append(Entry(operator, vars(space), operator, seen.before(operator)))
    return entries + [
        Entry(name, vars(layer), "forward_mqa", _wrapped(name, layer, seen, recorder))
        for name, layer in layers.items()
    ]


def _wrapped(name: str, layer: Any, seen: Seen, recorder: Looks) -> Callable[[Any], Any]:
    original = layer.forward_mqa

    def forward_mqa(*args: Any, **kwargs: Any) -> Any:
        try:
            answer = original(*args, **kwargs)
            ran = seen.ran
            recorder.look(
                name, lambda step: observe_launch(name, layer, _launch(name, ran), _metadata(), step)
            )
            recorder.look_indexers(name, lambda step: observe_indexers(name, layer, _indexers(ran), step))
            return answer
        finally:
            seen.clear()

    return lambda _: forward_mqa


def _metadata() -> Any:
    from vllm.forward_context import get_forward_context

    return get_forward_context().attn_metadata


def _launch(name: str, ran: Mapping[str, list[Ran]]) -> OperatorCall:
    launches = ran.get(OPERATOR, [])
    if len(launches) != 1:
        raise Unsupported(
            f"layer {name} launched {OPERATOR} {len(launches)} times where once was expected; this vLLM is "
            "not what the recorder was made for. Install a tested version (docs/engines.md).",
            rule="V-HOOK",
            layer=name,
        )
    return OperatorCall(*launches[0][0])


def _indexers(ran: Mapping[str, list[Ran]]) -> list[IndexerRun]:
    """The launches of an indexer: one operator gives the scores, the next one chooses among them."""
    chosen = [arguments[-1] for arguments, _ in ran.get(TOP_K, [])]
    scored = ran.get(SCORES, [])
    return [
        IndexerRun(*(*arguments, scores, chosen[i] if len(chosen) == len(scored) else None))
        for i, (arguments, scores) in enumerate(scored)
    ]
