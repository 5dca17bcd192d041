"""What an attention launch may do: positions, passes, versions. Pages and scales are in `memory`."""

from collections.abc import Mapping
from typing import NoReturn

from tracekit.gate.memory import Memory, place_rows
from tracekit.gate.onward import WINDOWED, Onward
from tracekit.gate.refusal import refuse
from tracekit.gate.state import Ledger, Pending, Phase, RequestState, Rows, Stream, StreamKey
from tracekit.model.events import Attend, GateMode, GraphUse, Read, Span

# A member of an enumeration costs five times a name of the module, and a call of the gate needs a dozen.
_TRAINING, _ACTIVE, _PREEMPTED, _FINISHED = Phase.TRAINING, Phase.ACTIVE, Phase.PREEMPTED, Phase.FINISHED
_TRAIN, _EAGER, _GRAPH, _RECOMPUTE = GateMode.TRAINING, GateMode.EAGER, GateMode.GRAPH, GateMode.RECOMPUTE
_LIVE, _LOST = Rows.LIVE, Rows.LOST

_NO_STREAMS: Mapping[StreamKey, Stream] = {}
_NONE: frozenset[StreamKey] = frozenset()


def attend(ledger: Ledger, event: Attend) -> Ledger:
    """Return the ledger after a launch.

    Raises:
        GateRefused: it may not come next.
    """
    spans, version = event.spans, event.model_version
    if ledger.asleep:
        refuse("G-ASLEEP", "a launch while the engine sleeps", layer=event.layer)
    if not spans:
        refuse("G-EMPTY", "a launch without rows", layer=event.layer)
    if version != ledger.model_version:
        code = "G-MODEL-STALE" if version < ledger.model_version else "G-MODEL-UNKNOWN"
        _refuse(code, event, spans[0], f"weights {version} run while {ledger.model_version} are in force")
    if event.graph is not None:
        _check_graph(ledger, event.graph, sum(span.end - span.first for span in spans), version)
    if len(spans) > 1 and len({span.request for span in spans}) != len(spans):
        refuse("G-ROWS-TWICE", "a launch names a request twice", layer=event.layer)
    requests, epoch = dict(ledger.requests), ledger.epoch + 1
    launch = Onward(ledger, event, epoch)
    for span in spans:
        name = span.request
        after = launch.after(requests.get(name), span)
        requests[name] = after or _advance(requests, ledger, event, span, epoch)
    return Ledger(
        ledger.model_version,
        epoch,
        ledger.fence,
        False,
        ledger.scale_generation,
        ledger.floors,
        ledger.graphs,
        requests,
        {**ledger.pending, epoch: Pending(event.kernel, version, event.layer)}
        if event.kernel
        else ledger.pending,
    )


def _refuse(code: str, event: Attend, span: Span, problem: str, **more: object) -> NoReturn:
    refuse(code, problem, request=span.request, layer=event.layer, position=span.first, **more)


def _check_graph(ledger: Ledger, use: GraphUse, rows: int, model_version: int) -> None:
    """Compare a replay with what the graph was captured with."""
    captured = ledger.graphs.get(use.name)
    if captured is None:
        refuse("G-GRAPH-UNKNOWN", "it was never captured", graph=use.name)
    graph, version = captured
    if use.addresses != graph.addresses:
        pairs = zip(graph.addresses, use.addresses, strict=False)
        moved = next((f"buffer {at}" for at, (a, b) in enumerate(pairs) if a != b), "the number of buffers")
        refuse("G-GRAPH-ADDRESS", f"{moved} is not what it was at capture", graph=use.name)
    if use.rows != graph.rows or rows > graph.rows:
        text = f"captured for {graph.rows} rows, replayed for {use.rows} with {rows}"
        refuse("G-GRAPH-SHAPE", text, graph=use.name)
    if use.shapes != graph.shapes:
        both = enumerate(zip(graph.shapes, use.shapes, strict=False))
        found = next((f"buffer {at} was {was} and is {now}" for at, (was, now) in both if was != now), "")
        refuse("G-GRAPH-SHAPE", found or "not as many shapes as at capture", graph=use.name)
    if version != model_version:
        text = f"captured under weights {version}, replayed under {model_version}"
        refuse("G-GRAPH-VERSION", text, graph=use.name)


def _advance(
    requests: dict[str, RequestState],
    ledger: Ledger,
    event: Attend,
    span: Span,
    epoch: int,
) -> RequestState:
    """Return one request after its rows of a launch."""
    name, first, end, mode, reads = span
    keys = frozenset([(event.layer, read.family) for read in reads])
    if end <= first or first < 0 or not reads:
        _refuse("G-EMPTY", event, span, f"rows [{first}, {end}) of {len(reads)} families")
    if len(keys) != len(reads):
        _refuse("G-ROWS-TWICE", event, span, "a KV family is read twice")
    if (mode is _GRAPH) != (event.graph is not None):
        _refuse("G-GRAPH-MODE", event, span, f"{mode} {'without' if event.graph is None else 'with'} a graph")
    request = requests.get(name) or _new(event, mode)
    if mode is _RECOMPUTE:
        # Rows that were lost are given back to the request; else they are computed beside it.
        lost = request.phase is _ACTIVE and request.known > request.length
        if not lost and request.phase is not _PREEMPTED:
            _check_recompute(request, event, span, keys)
            return request
        if first >= request.known:
            _refuse("G-RECOMPUTE-UNKNOWN", event, span, f"{request.known} rows were computed before")
    _check_phase(request, ledger, event, span)
    request = _pass(request, event, span, keys)
    phase, _, _, done, known, cached, closed, version, _, fence, streams = _weights(request, event, span)

    changed: dict[StreamKey, Stream] | None = None
    for read in reads:
        key = event.layer, read.family
        held = streams.get(key)
        if held is None and closed:
            _refuse("G-STREAM-NEW", event, span, f"it has no {read.family} rows there")
        stream = _stream(requests, ledger, event, span, read, held, phase)
        if stream is not held:
            changed = changed or dict(streams)
            changed[key] = stream
    if changed is not None:
        streams = changed
    length, ahead, done = request.length, end, done | keys
    if closed and len(done) == len(streams):
        known, done = max(known, end), _NONE
        length = ahead = 0 if phase is _TRAINING else end
    if phase is _PREEMPTED:
        phase, cached = _ACTIVE, 0
    return RequestState(phase, length, ahead, done, known, cached, closed, version, epoch, fence, streams)


def _new(event: Attend, mode: GateMode) -> RequestState:
    phase = _TRAINING if mode is _TRAIN else _ACTIVE
    return RequestState(phase, 0, 0, _NONE, 0, 0, False, event.model_version, 0, 0, _NO_STREAMS)


def _check_recompute(request: RequestState, event: Attend, span: Span, keys: frozenset[StreamKey]) -> None:
    """Rows computed again beside the cache, by a trainer or for a backward: nothing of the ledger moves."""
    before = request.ahead if keys <= request.done else request.known
    if not keys <= request.streams.keys() or span.end > before:
        _refuse("G-RECOMPUTE-UNKNOWN", event, span, f"rows before {before} were computed, not {span.end}")
    if request.model_version != event.model_version:
        _refuse_recompute(request, event, span)


def _check_phase(request: RequestState, ledger: Ledger, event: Attend, span: Span) -> None:
    """The mode fits what the request is doing."""
    mode = span.mode
    if (mode is _TRAIN) != (request.phase is _TRAINING):
        _refuse("G-TRAINING-CACHE", event, span, f"it is {request.phase}, and its rows come in {mode}")
    if request.phase is _FINISHED:
        _refuse("G-FINISHED", event, span, "it has finished")
    if span.first == 0 and (mode is _EAGER or mode is _GRAPH):
        _refuse("G-DECODE-FIRST", event, span, "it decodes without a prefill")
    if request.fence > ledger.fence:
        text = f"rows of epoch {request.fence} and a fence at epoch {ledger.fence}"
        _refuse("G-NOT-VISIBLE", event, span, text)


def _pass(request: RequestState, event: Attend, span: Span, keys: frozenset[StreamKey]) -> RequestState:
    """Find the pass that a launch belongs to: the open one or the one behind it."""
    first, end, done = span.first, span.end, request.done
    training = request.phase is _TRAINING
    if done and keys <= done:
        if first == request.ahead or training:
            if request.closed:
                layer, family = min(request.streams.keys() - done)
                text = f"{family} of layer {layer} has not computed [{request.length}, {request.ahead})"
                _refuse("G-PASS-OPEN", event, span, text)
            request = request.settled()
            done = request.done
        elif first == request.length and end == request.ahead:
            _refuse("G-POSITION-REPEAT", event, span, f"[{first}, {end}) is computed in this pass already")
    start = request.ahead if done & keys else request.length
    if first != start:
        if training:
            _refuse("G-TRAINING-START", event, span, f"a training pass begins at {first}")
        code = "G-POSITION-GAP" if first > start else "G-POSITION-REWIND"
        _refuse(code, event, span, f"{start} rows are committed, and the launch begins at {first}")
    if done and (end != request.ahead or done & keys):
        text = f"[{first}, {end}) where other layers computed [{request.length}, {request.ahead})"
        _refuse("G-PASS-END", event, span, text)
    return request


def _weights(request: RequestState, event: Attend, span: Span) -> RequestState:
    """A request goes on under the weights of its KV; without KV it begins anew under those in force."""
    version = event.model_version
    if request.model_version == version:
        return request
    if request.length or request.done:
        text = f"its KV was written under weights {request.model_version}, and the launch runs {version}"
        _refuse("G-KV-MODEL", event, span, text)
    if span.mode is _RECOMPUTE:
        _refuse_recompute(request, event, span)
    return request._replace(model_version=version, known=0)


def _refuse_recompute(request: RequestState, event: Attend, span: Span) -> NoReturn:
    text = f"computed under weights {request.model_version}, and again under {event.model_version}"
    _refuse("G-RECOMPUTE-VERSION", event, span, text)


def _stream(
    requests: dict[str, RequestState],
    ledger: Ledger,
    event: Attend,
    span: Span,
    read: Read,
    old: Stream | None,
    phase: Phase,
) -> Stream:
    """Return a stream after a launch; the same object where nothing of it changed."""
    family, version, oldest, scales, pages = read
    if ledger.floors and version < (floor := ledger.floor((event.layer, family))):
        text = f"cache version {version}, and those before {floor} are void"
        _refuse("G-CACHE-RESET", event, span, text, family=family.value)
    window = event.window if family in WINDOWED else None
    same = old == (version, oldest, window, None, None, 0, _LIVE)
    if old is not None and same and not (scales or pages):
        return old
    if old is not None and phase is _TRAINING:
        old = None  # each training pass writes KV of its own
    if old is not None and (version != old.cache_version or old.rows is _LOST):
        _check_version(event, span, read, old)
        if old.rows is _LOST:
            old = None
    dropped = 0 if old is None else old.first
    # What a window dropped is missing in a wider one: only an event takes rows that may still be read.
    wider = old is not None and old.window is not None and (window is None or window > old.window)
    kept = 0 if wider else dropped
    needed = kept if window is None else max(kept, span.first - window + 1)
    if oldest > needed:
        text = f"rows from {oldest} on are held, and those from {needed} on may be read"
        _refuse("G-KV-MISSING", event, span, text, family=family.value)
    if oldest < dropped:
        text = f"row {oldest} is read, and those before {dropped} were dropped"
        _refuse("G-EVICTED", event, span, text, family=family.value)
    shared = 0
    if scales or pages or (old is not None and (old.scales or old.pages)):
        memory = Memory(requests, event.layer, ledger.scale_generation)
        shared = place_rows(memory, span, read, old)
    new = Stream(version, oldest, window, scales, pages, shared, _LIVE)
    return old if old == new else new


def _check_version(event: Attend, span: Span, read: Read, old: Stream) -> None:
    version, written = read.cache_version, old.cache_version
    text = f"written under cache version {written}, and the launch has {version}"
    if version < written or (version == written and old.rows is _LOST):
        _refuse("G-CACHE-STALE", event, span, text, family=read.family.value)
    if old.rows is _LIVE:
        _refuse("G-CACHE-NEWER", event, span, text, family=read.family.value)
