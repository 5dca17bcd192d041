"""A second model of the rules of the gate, written from docs/gate.md and sharing no code with the first.

It is slow and simple: it keeps every KV row by itself, and each stream of each request its own position.
`step` says whether an event is legal, and carries it out where it is.
"""

from dataclasses import dataclass, field

from tracekit.model import KVFamily
from tracekit.model import events as e
from tracekit.model.events import GateMode


@dataclass
class Row:
    scale: int | None
    page: int | None


@dataclass
class Stream:
    version: int
    first: int = 0
    window: int | None = None
    position: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    page_size: int = 0
    block: int = 0
    after: str = "same"
    """What the next cache version may be: the `same`, `same or newer`, only `newer`."""


@dataclass
class Request:
    training: bool
    weights: int
    status: str = "active"
    base: int = 0
    frozen: bool = False
    ever: int = 0
    cached: int = 0
    unseen: int = 0
    streams: dict[tuple[int, KVFamily], Stream] = field(default_factory=dict)

    @property
    def slowest(self):
        return min([s.position for s in self.streams.values()], default=self.base)

    @property
    def fastest(self):
        return max([s.position for s in self.streams.values()], default=self.base)

    def freeze(self):
        """The first pass is over where one ran."""
        if not self.frozen and any(s.position > self.base for s in self.streams.values()):
            self.frozen = True
            self.ever = max(self.ever, self.fastest)
            for stream in self.streams.values() if self.training else ():
                stream.position = 0


class Illegal(Exception):
    pass


def need(condition):
    if not condition:
        raise Illegal


class Naive:
    def __init__(self):
        self.weights = self.scale = self.clock = self.fenced = 0
        self.asleep = False
        self.floors = {}
        self.graphs = {}
        self.waiting = {}
        self.requests = {}

    def step(self, event):
        from copy import deepcopy

        saved = deepcopy(self.__dict__)
        try:
            getattr(self, type(event).__name__.lower())(event)
        except Illegal:
            self.__dict__ = saved
            return False
        return True

    # launches

    def attend(self, event):
        need(not self.asleep)
        need(event.spans)
        need(event.model_version == self.weights)
        rows = sum(span.end - span.first for span in event.spans)
        if event.graph is not None:
            need(event.graph.name in self.graphs)
            captured, weights = self.graphs[event.graph.name]
            need(captured == event.graph)
            need(rows <= captured.rows)
            need(weights == event.model_version)
        need(len({span.request for span in event.spans}) == len(event.spans))
        self.clock += 1
        for span in event.spans:
            self.span(event, span)
        if event.kernel:
            self.waiting[self.clock] = (event.kernel, event.model_version)

    def backward(self, event):
        need(event.forward in self.waiting)
        need(self.waiting[event.forward] == (event.kernel, self.weights))
        need(event.model_version == self.weights)
        if not event.retained:
            del self.waiting[event.forward]
        self.clock += 1

    def span(self, event, span):
        need(0 <= span.first < span.end)
        keys = [(event.layer, read.family) for read in span.reads]
        need(keys)
        need(len(set(keys)) == len(keys))
        need((span.mode is GateMode.GRAPH) == (event.graph is not None))
        request = self.requests.get(span.request)
        training = span.mode is GateMode.TRAINING
        if request is None:
            request = Request(training, event.model_version)
        if span.mode is GateMode.RECOMPUTE:
            missing = request.status == "active" and not request.training and request.ever > request.slowest
            if request.status != "preempted" and not missing:
                self.beside(request, event, span, keys)
                return
            need(span.first < request.ever)
        need(training == request.training)
        need(request.status != "finished")
        if span.mode in (GateMode.EAGER, GateMode.GRAPH):
            need(span.first > 0)
        need(request.unseen <= self.fenced)
        if training:
            need(span.first == 0)
            self.train(request, event, span, keys)
        else:
            self.serve(request, event, span, keys)
        for read in span.reads:
            self.read(request, event, span, read)
        for key in keys:
            request.streams[key].position = span.end
        if request.frozen and len({s.position for s in request.streams.values()}) == 1:
            request.ever = max(request.ever, span.end)
            if training:
                for stream in request.streams.values():
                    stream.position = 0
        if request.status == "preempted":
            request.status, request.cached = "active", 0
        self.requests[span.request] = request

    def beside(self, request, event, span, keys):
        for key in keys:
            need(key in request.streams)
        run = all(
            request.streams[key].position == request.fastest and request.fastest > request.slowest
            for key in keys
        )
        # in a first pass nobody knows of slower streams: those that are known all ran
        run = run or (not request.frozen and request.fastest > request.base)
        need(span.end <= (request.fastest if run else request.ever))
        need(event.model_version == request.weights)

    def train(self, request, event, span, keys):
        """A pass starts at 0 when all streams have done the one before; streams that did not, join it."""
        known = [request.streams[key] for key in keys if key in request.streams]
        if len(known) == len(keys) and all(stream.position for stream in known):
            need(not request.frozen)
            request.freeze()
        need(all(stream.position == 0 for stream in known))
        running = {stream.position for stream in request.streams.values() if stream.position}
        need(not running or running == {span.end})
        if running:
            need(request.weights == event.model_version)
        elif request.weights != event.model_version:
            request.weights, request.ever = event.model_version, 0
        need(not request.frozen or len(known) == len(keys))

    def serve(self, request, event, span, keys):
        mine = [request.streams.get(key) for key in keys]
        positions = {request.base if stream is None else stream.position for stream in mine}
        need(positions == {span.first})
        others = [s.position for key, s in request.streams.items() if key not in keys]
        need(all(position in (span.first, span.end) for position in others))
        if span.first > request.base:
            request.freeze()
        need(not request.frozen or None not in mine)
        if request.weights != event.model_version:
            need(span.first == 0)
            need(request.fastest == 0)
            need(span.mode is not GateMode.RECOMPUTE)
            request.weights, request.ever = event.model_version, 0

    def read(self, request, event, span, read):
        family, ratio = read.family, read.family.ratio
        key = (event.layer, family)
        for (layer, kind), floor in self.floors.items():
            if layer in (None, event.layer) and kind in (None, family):
                need(read.cache_version >= floor)
        stream = request.streams.get(key)
        if stream is None or request.training:
            stream = Stream(read.cache_version)
        elif stream.after == "newer":
            need(read.cache_version > stream.version)
            stream = Stream(read.cache_version)
        elif stream.after == "same":
            need(read.cache_version == stream.version)
        else:
            need(read.cache_version >= stream.version)
        window = event.window if family in (KVFamily.DENSE, KVFamily.RECENT) else None
        oldest = stream.first if window is None else max(stream.first, span.first - window + 1)
        need(stream.first <= read.first <= oldest)
        before = span.first // ratio if stream.rows or stream.first else 0
        if not stream.rows:
            before = 0
        rows = span.end // ratio
        self.scales(stream, read, before, rows)
        self.pages(span.request, key, stream, read, before, rows)
        stream.version, stream.first, stream.window, stream.after = (
            read.cache_version,
            read.first,
            window,
            "same",
        )
        for number in range(rows):
            old = stream.rows.get(number)
            scale = read.scales.generations[number // read.scales.rows] if read.scales else None
            page = read.pages.table[number // read.pages.rows] if read.pages else None
            stream.rows[number] = Row(scale if old is None else old.scale, page)
        request.streams[key] = stream

    def scales(self, stream, read, before, rows):
        scales = read.scales
        if before:
            need((stream.rows[0].scale is None) == (scales is None))
        if scales is None:
            return
        size = scales.rows
        need(size >= 1)
        need(not before or size == stream.block)
        need(len(scales.generations) == (rows + size - 1) // size)
        for number in range(rows):
            generation = scales.generations[number // size]
            if number < before:
                need(stream.rows[number].scale == generation)
            else:
                need(generation == self.scale)
        stream.block = size

    def pages(self, name, key, stream, read, before, rows):
        pages = read.pages
        if before:
            need((stream.rows[0].page is None) == (pages is None))
        if pages is None:
            return
        size = pages.rows
        need(size >= 1)
        need(not before or size == stream.page_size)
        need(len(pages.table) >= (rows + size - 1) // size)
        start = read.first // size * size
        written = {number // size for number in range(before, rows)}
        copied = False
        for number in range(start, before):
            there, now = stream.rows[number].page, pages.table[number // size]
            if there != now:
                # copy on write of the page that new rows fill up, while another request reads it
                need(number // size in written)
                need(self.readers(name, key, there))
                copied = True
        used = [pages.table[index] for index in range(read.first // size, (rows + size - 1) // size)]
        need(len(set(used)) == len(used))
        for index in sorted(written):
            page = pages.table[index]
            need(not self.readers(name, key, page))
            fresh = copied or index * size >= before
            self.overwrite(name, key, page, 0 if fresh else before - index * size)
        stream.page_size = size

    def readers(self, me, key, page):
        """The other requests whose live rows lie on a page."""
        found = []
        for name, other in self.requests.items():
            stream = other.streams.get(key)
            if name == me or other.status != "active" or other.training or stream is None:
                continue
            if not stream.page_size:
                continue
            live = range(stream.first // stream.page_size * stream.page_size, stream.position // key[1].ratio)
            if any(stream.rows[number].page == page for number in live):
                found.append(name)
        return found

    def overwrite(self, me, key, page, offset):
        """Cached rows on a page from an offset on, and those behind them, cannot be adopted any more."""
        for other in self.requests.values():
            stream = other.streams.get(key)
            if other.status == "active" or stream is None or not stream.page_size:
                continue
            cached = other.cached // key[1].ratio
            live = range(stream.first // stream.page_size * stream.page_size, cached)
            hit = [number for number in live if stream.rows[number].page == page]
            if hit:
                written = hit[0] // stream.page_size * stream.page_size + offset
                other.cached = min(other.cached, written * key[1].ratio)

    # requests

    def active(self, name):
        need(name in self.requests)
        request = self.requests[name]
        need(request.status == "active" and not request.training)
        request.freeze()
        return request

    def preempt(self, event):
        self.lose(self.active(event.request))

    def lose(self, request):
        request.freeze()
        request.cached = request.slowest
        request.status = "preempted"
        request.base = 0
        for stream in request.streams.values():
            stream.position, stream.after = 0, "newer"

    def rollback(self, event):
        request = self.active(event.request)
        need(0 <= event.to <= request.fastest)
        to = min(event.to, request.slowest)
        self.window(request, to)
        request.ever = min(request.ever, to)
        request.base = to
        for key, stream in request.streams.items():
            stream.position = to
            stream.rows = {n: row for n, row in stream.rows.items() if n < to // key[1].ratio}
            if stream.after != "newer":
                stream.after = "same or newer"

    def window(self, request, at):
        for stream in request.streams.values():
            if stream.window is not None:
                need(stream.first <= max(0, at - stream.window + 1))

    def fork(self, event):
        need(not self.asleep)
        need(event.request not in self.requests)
        parent = self.active(event.parent)
        need(1 <= event.at <= parent.slowest)
        self.window(parent, event.at)
        self.share(parent, event.request, event.at)

    def adopt(self, event):
        need(not self.asleep)
        old = self.requests.get(event.request)
        need(old is None or old.status == "preempted")
        need(event.model_version == self.weights)
        if not event.source:
            need(event.at >= 1)
            need(old is None)
            self.clock += 1
            self.requests[event.request] = Request(
                False, event.model_version, base=event.at, ever=event.at, unseen=self.clock
            )
            return
        need(event.source in self.requests)
        source = self.requests[event.source]
        need(not (source.training and source.status == "active"))
        source.freeze()
        need(1 <= event.at <= (source.slowest if source.status == "active" else source.cached))
        need(source.weights == event.model_version)
        for (layer, family), stream in source.streams.items():
            for (at, kind), floor in self.floors.items():
                if at in (None, layer) and kind in (None, family):
                    need(stream.version >= floor)
        self.window(source, event.at)
        self.share(source, event.request, event.at)

    def share(self, source, name, at):
        self.clock += 1
        old = self.requests.get(name)
        ever = at if old is None or old.weights != source.weights else max(at, old.ever)
        taker = Request(False, source.weights, base=at, frozen=source.frozen, ever=ever, unseen=source.unseen)
        for key, stream in source.streams.items():
            rows = {n: Row(r.scale, r.page) for n, r in stream.rows.items() if n < at // key[1].ratio}
            taker.streams[key] = Stream(
                stream.version,
                stream.first,
                stream.window,
                at,
                rows,
                stream.page_size,
                stream.block,
                "same or newer",
            )
        self.requests[name] = taker

    def evict(self, event):
        need(event.request in self.requests)
        request = self.requests[event.request]
        if event.before is None:
            need(request.status in ("finished", "preempted"))
            del self.requests[event.request]
            return
        request = self.active(event.request)
        key = (event.layer, event.family)
        need(key in request.streams)
        stream = request.streams[key]
        need(stream.first <= event.before <= request.slowest // event.family.ratio)
        stream.first = event.before

    def finish(self, event):
        need(event.request in self.requests)
        request = self.requests[event.request]
        need(request.status != "finished")
        request.freeze()
        if request.training:
            request.cached = 0
            for stream in request.streams.values():
                stream.position = 0
        elif request.status == "active":
            request.cached = request.slowest
            for stream in request.streams.values():
                stream.position = request.cached
        request.status = "finished"

    def migrate(self, event):
        request = self.active(event.request)
        need(request.fastest == request.slowest)
        need(event.model_version == self.weights)
        need(event.model_version > request.weights)
        request.weights, request.ever = event.model_version, 0

    # the engine

    def newweights(self, event):
        need(event.model_version > self.weights)
        self.weights = event.model_version

    def resetcache(self, event):
        key = (event.layer, event.family)
        need(event.cache_version > self.floors.get(key, 0))
        self.floors[key] = event.cache_version

    def rescale(self, event):
        need(event.generation > self.scale)
        self.scale = event.generation

    def sleep(self, event):
        need(not self.asleep)
        self.asleep = True
        if event.keeps_cache:
            return
        for request in self.requests.values():
            request.freeze()
            if request.status == "active" and not request.training:
                self.lose(request)
            request.cached = 0

    def wake(self, event):
        need(self.asleep)
        self.asleep = False

    def fence(self, event):
        self.fenced = self.clock

    def capture(self, event):
        need(event.model_version == self.weights)
        need(not self.asleep)
        self.graphs[event.graph.name] = (event.graph, event.model_version)


assert all(hasattr(Naive, kind.__name__.lower()) for kind in e.Event.__args__)
