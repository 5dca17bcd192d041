"""The state machine: a ledger and an event give the next ledger, or a refusal with its code.

Pure: nothing is changed, so a caller that meets an error simply keeps the ledger that it had.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tracekit.gate.attend import attend
from tracekit.gate.engine import ENGINE
from tracekit.gate.memory import cut
from tracekit.gate.refusal import refuse
from tracekit.gate.state import Ledger, Phase, RequestState, Rows, Stream
from tracekit.gate.typed import check_types
from tracekit.model.events import (
    Adopt,
    Attend,
    Backward,
    Event,
    Evict,
    Finish,
    Fork,
    Migrate,
    Preempt,
    Rollback,
)


def transition(ledger: Ledger, event: Event) -> Ledger:
    """Return the ledger after an event.

    Raises:
        GateRefused: the event may not come next; `rule` is the code (docs/gate.md), `fields` the place.
        TypeError: it is no event, or a field of it is of another type.
    """
    rule = _RULES.get(type(event))
    if rule is None:
        raise TypeError(f"{event!r} is no event of tracekit.model.events")
    check_types(event)
    return rule(ledger, event)


def _backward(ledger: Ledger, event: Backward) -> Ledger:
    forward = ledger.pending.get(event.forward)
    if forward is None:
        text = f"no forward of epoch {event.forward} waits for a backward"
        refuse("G-BACKWARD", text, epoch=event.forward)
    if event.kernel != forward.kernel:
        text = f"{event.kernel} follows a forward of {forward.kernel}"
        refuse("G-BACKWARD", text, layer=forward.layer, epoch=event.forward)
    if not event.model_version == forward.model_version == ledger.model_version:
        text = (
            f"a forward under weights {forward.model_version} and a backward under {event.model_version}, "
            f"while {ledger.model_version} are in force"
        )
        refuse("G-BACKWARD-STALE", text, layer=forward.layer, epoch=event.forward)
    pending = ledger.pending
    if not event.retained:
        pending = {epoch: other for epoch, other in pending.items() if epoch != event.forward}
    return ledger._replace(epoch=ledger.epoch + 1, pending=pending)


def _preempt(ledger: Ledger, event: Preempt) -> Ledger:
    request = _active(ledger, event.request).settled()
    return _with(ledger, event.request, request.lost())


def _rollback(ledger: Ledger, event: Rollback) -> Ledger:
    request = _active(ledger, event.request).settled()
    if not 0 <= event.to <= request.ahead:
        text = f"it has {request.ahead} rows and cannot go back to {event.to}"
        refuse("G-AHEAD", text, request=event.request, position=event.to)
    # A pass that failed half-way is dropped with it: some streams have its rows, others do not.
    to = min(event.to, request.length)
    _check_window(event.request, request, to)
    kept = request._replace(
        length=to,
        ahead=to,
        done=frozenset(),
        known=min(request.known, to),
        streams={key: _shortened(stream, to // key[1].ratio) for key, stream in request.streams.items()},
    )
    return _with(ledger, event.request, kept)


def _shortened(stream: Stream, rows: int) -> Stream:
    scales, pages, shared = cut(stream, rows)
    kept = Rows.LOST if stream.rows is Rows.LOST else Rows.REOPENED
    return stream._replace(scales=scales, pages=pages, shared=shared, rows=kept)


def _check_window(name: str, request: RequestState, at: int) -> None:
    """A window that goes on from `at` reads rows that it may have dropped already."""
    for (layer, family), stream in request.streams.items():
        needed = 0 if stream.window is None else max(0, at - stream.window + 1)
        # What was evicted by an event is no loss at any length; a window alone drops rows as it goes.
        if stream.window is not None and stream.first > needed:
            text = f"its window reads from row {needed} on, and those before {stream.first} are gone"
            place = {"request": name, "layer": layer, "family": family.value, "position": at}
            refuse("G-WINDOW-GONE", text, **place)


def _fork(ledger: Ledger, event: Fork) -> Ledger:
    _awake(ledger, event.request)
    if event.request in ledger.requests:
        refuse("G-REQUEST-EXISTS", "a fork is a new request", request=event.request)
    parent = _active(ledger, event.parent).settled()
    _check_at(event.request, event.at, parent.length)
    _check_window(event.request, parent, event.at)
    return _share(ledger, event.parent, parent, event.request, event.at)


def _adopt(ledger: Ledger, event: Adopt) -> Ledger:
    _awake(ledger, event.request)
    old = ledger.requests.get(event.request)
    if old is not None and old.phase is not Phase.PREEMPTED:
        refuse("G-REQUEST-EXISTS", f"it is {old.phase} and adopts no prefix", request=event.request)
    if event.model_version != ledger.model_version:
        text = f"it adopts rows of weights {event.model_version} while {ledger.model_version} are in force"
        refuse("G-PREFIX-STALE", text, request=event.request, position=0)
    if not event.source:
        return _adopt_from_elsewhere(ledger, event, old)
    source = _known(ledger, event.source)
    if source.phase is Phase.TRAINING:
        refuse("G-REQUEST-STATE", "it is trained on and keeps no rows to adopt", request=event.source)
    source = source.settled()
    held = source.length if source.phase is Phase.ACTIVE else source.cached
    _check_at(event.request, event.at, held)
    if source.model_version != event.model_version:
        text = f"the rows of request {event.source} were written under weights {source.model_version}"
        refuse("G-PREFIX-VERSION", text, request=event.request, position=0)
    for key, stream in source.streams.items():
        if stream.cache_version < ledger.floor(key):
            text = (
                f"rows of cache version {stream.cache_version}, and those before {ledger.floor(key)} are void"
            )
            place = {"request": event.request, "layer": key[0], "family": key[1].value}
            refuse("G-CACHE-RESET", text, **place)
    _check_window(event.request, source, event.at)
    return _share(ledger, event.source, source, event.request, event.at)


def _adopt_from_elsewhere(ledger: Ledger, event: Adopt, old: RequestState | None) -> Ledger:
    """Rows that another engine wrote: their streams are seen at the next launch, after a fence."""
    if event.at < 1:
        _check_at(event.request, event.at, 0)
    if old is not None:
        refuse("G-REQUEST-EXISTS", "rows from elsewhere begin a new request", request=event.request)
    epoch = ledger.epoch + 1
    request = RequestState(
        Phase.ACTIVE,
        event.at,
        event.at,
        frozenset(),
        event.at,
        0,
        False,
        event.model_version,
        epoch,
        epoch,
        {},
    )
    return _with(ledger._replace(epoch=epoch), event.request, request)


def _share(ledger: Ledger, giver: str, source: RequestState, taker: str, at: int) -> Ledger:
    """Give the first rows of one request to another, which may be the same after a preemption."""
    given, kept = {}, {}
    for key, stream in source.streams.items():
        rows = at // key[1].ratio
        scales, pages, _ = cut(stream, rows)
        given[key] = stream._replace(scales=scales, pages=pages, shared=rows, rows=Rows.REOPENED)
        kept[key] = stream._replace(shared=max(stream.shared, rows))
    epoch = ledger.epoch + 1
    requests = dict(ledger.requests)
    if giver != taker:
        requests[giver] = source._replace(streams=kept)
    old = requests.get(taker)
    known = at if old is None or old.model_version != source.model_version else max(at, old.known)
    requests[taker] = RequestState(
        Phase.ACTIVE,
        at,
        at,
        frozenset(),
        known,
        0,
        source.closed,
        source.model_version,
        epoch,
        source.fence,
        given,
    )
    return ledger._replace(epoch=epoch, requests=requests)


def _evict(ledger: Ledger, event: Evict) -> Ledger:
    request = _known(ledger, event.request)
    if event.before is None:
        if request.phase not in (Phase.FINISHED, Phase.PREEMPTED):
            text = f"it is {request.phase}, and is neither finished nor preempted"
            refuse("G-REQUEST-STATE", text, request=event.request)
        requests = {name: state for name, state in ledger.requests.items() if name != event.request}
        return ledger._replace(requests=requests)
    request = _active(ledger, event.request).settled()
    key = event.layer, event.family
    stream = request.streams.get(key)
    if stream is None:
        refuse(
            "G-STREAM-NEW", f"it has no {event.family} rows there", request=event.request, layer=event.layer
        )
    rows = request.length // event.family.ratio
    if not stream.first <= event.before <= rows:
        text = f"{event.family} rows {stream.first} to {rows} are held, and those before {event.before} go"
        refuse("G-AHEAD", text, request=event.request, layer=event.layer)
    streams = {**request.streams, key: stream._replace(first=event.before)}
    return _with(ledger, event.request, request._replace(streams=streams))


def _finish(ledger: Ledger, event: Finish) -> Ledger:
    request = _known(ledger, event.request).settled()
    if request.phase is Phase.FINISHED:
        refuse("G-REQUEST-STATE", "it has finished already", request=event.request)
    cached = request.length if request.phase is Phase.ACTIVE else request.cached
    ended = request._replace(phase=Phase.FINISHED, ahead=request.length, done=frozenset(), cached=cached)
    return _with(ledger, event.request, ended)


def _migrate(ledger: Ledger, event: Migrate) -> Ledger:
    request = _active(ledger, event.request).settled()
    if request.done:
        text = f"some layers have not computed [{request.length}, {request.ahead})"
        refuse("G-PASS-OPEN", text, request=event.request)
    if event.model_version != ledger.model_version or event.model_version <= request.model_version:
        text = f"from weights {request.model_version} to {event.model_version}, not those in force"
        refuse("G-MIGRATE", text, request=event.request)
    # Rows of older weights cannot be computed again under the new ones with the same bytes.
    return _with(ledger, event.request, request._replace(model_version=event.model_version, known=0))


def _known(ledger: Ledger, name: str) -> RequestState:
    request = ledger.requests.get(name)
    if request is None:
        refuse("G-REQUEST-UNKNOWN", "it was never seen, or is evicted", request=name)
    return request


def _active(ledger: Ledger, name: str) -> RequestState:
    request = _known(ledger, name)
    if request.phase is not Phase.ACTIVE:
        refuse("G-REQUEST-STATE", f"it is {request.phase}, not active", request=name)
    return request


def _awake(ledger: Ledger, name: str) -> None:
    if ledger.asleep:
        refuse("G-ASLEEP", "a request begins while the engine sleeps", request=name)


def _check_at(name: str, at: int, held: int) -> None:
    if not 1 <= at <= held:
        refuse(
            "G-AHEAD", f"it begins with {at} rows of a request that holds {held}", request=name, position=at
        )


def _with(ledger: Ledger, name: str, request: RequestState) -> Ledger:
    return ledger._replace(requests={**ledger.requests, name: request})


_RULES: Mapping[type, Callable[[Ledger, Any], Ledger]] = {
    Attend: attend,
    Backward: _backward,
    Preempt: _preempt,
    Rollback: _rollback,
    Fork: _fork,
    Adopt: _adopt,
    Evict: _evict,
    Finish: _finish,
    Migrate: _migrate,
    **ENGINE,
}
