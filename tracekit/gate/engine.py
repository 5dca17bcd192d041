"""What an engine does to itself, and so to all of its requests: weights, caches, scales, sleep, graphs."""

from collections.abc import Callable, Mapping
from typing import Any

from tracekit.gate.refusal import refuse
from tracekit.gate.state import Ledger, Phase
from tracekit.model.events import Capture, Fence, NewWeights, Rescale, ResetCache, Sleep, Wake


def _new_weights(ledger: Ledger, event: NewWeights) -> Ledger:
    _rises("weights", ledger.model_version, event.model_version)
    # A backward under newer weights is refused; those of the weights before them are kept to say so.
    pending = {
        epoch: forward
        for epoch, forward in ledger.pending.items()
        if forward.model_version == ledger.model_version
    }
    return ledger._replace(model_version=event.model_version, pending=pending)


def _reset_cache(ledger: Ledger, event: ResetCache) -> Ledger:
    place = event.layer, event.family
    _rises("cache version", ledger.floors.get(place, 0), event.cache_version)
    return ledger._replace(floors={**ledger.floors, place: event.cache_version})


def _rescale(ledger: Ledger, event: Rescale) -> Ledger:
    _rises("scales", ledger.scale_generation, event.generation)
    return ledger._replace(scale_generation=event.generation)


def _rises(what: str, old: int, new: int) -> None:
    if new <= old:
        refuse("G-VERSION-BACK", f"the {what} go from {old} to {new}")


def _sleep(ledger: Ledger, event: Sleep) -> Ledger:
    if ledger.asleep:
        refuse("G-ASLEEP", "the engine sleeps already")
    if event.keeps_cache:
        return ledger._replace(asleep=True)
    requests = {}
    for name, request in ledger.requests.items():
        lost = request.settled()
        if lost.phase is Phase.ACTIVE:
            lost = lost.lost()
        requests[name] = lost._replace(cached=0)
    return ledger._replace(asleep=True, requests=requests)


def _wake(ledger: Ledger, _: Wake) -> Ledger:
    if not ledger.asleep:
        refuse("G-ASLEEP", "the engine is awake already")
    return ledger._replace(asleep=False)


def _fence(ledger: Ledger, _: Fence) -> Ledger:
    return ledger._replace(fence=ledger.epoch)


def _capture(ledger: Ledger, event: Capture) -> Ledger:
    graph = event.graph
    if event.model_version != ledger.model_version:
        text = f"captured under weights {event.model_version} while {ledger.model_version} are in force"
        refuse("G-GRAPH-VERSION", text, graph=graph.name)
    if ledger.asleep:
        refuse("G-ASLEEP", "captured while the engine sleeps", graph=graph.name)
    graphs: Mapping[str, Any] = {**ledger.graphs, graph.name: (graph, event.model_version)}
    return ledger._replace(graphs=graphs)


ENGINE: Mapping[type, Callable[[Ledger, Any], Ledger]] = {
    NewWeights: _new_weights,
    ResetCache: _reset_cache,
    Rescale: _rescale,
    Sleep: _sleep,
    Wake: _wake,
    Fence: _fence,
    Capture: _capture,
}
"""The rule of each event."""
