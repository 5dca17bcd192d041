"""Random histories against a second model of the rules (naive.py), and refusals that move nothing."""

import pytest
from hypothesis import event as tally
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.gate.naive import Naive
from tests.gate.searching import searching
from tracekit.errors import GateRefused
from tracekit.gate import CODES, Ledger, transition
from tracekit.gate.state import canonical
from tracekit.model import KVFamily
from tracekit.model import events as e
from tracekit.model.events import GateMode

NAMES = ["a", "b", "c", "d"]
LAYERS = {0: (KVFamily.DENSE,), 1: (KVFamily.RECENT, KVFamily.C4)}
WINDOWS = {0: None, 1: 6}
PAGE, BLOCK = 4, 2
rarely = st.integers(0, 24).map(lambda n: n == 7)
often = st.integers(0, 2).map(lambda n: n == 1)


class Histories(RuleBasedStateMachine):
    """Events that are mostly what may come next, each with a chance to be off by one somewhere."""

    def __init__(self):
        super().__init__()
        self.ledger, self.naive = Ledger(), Naive()
        self.paged = self.scaled = False

    @initialize(paged=st.booleans(), scaled=st.booleans())
    def kind(self, paged, scaled):
        self.paged, self.scaled = paged, scaled

    def tell(self, event):
        before, digest = canonical(self.ledger), self.ledger.digest
        try:
            after, code = transition(self.ledger, event), None
        except GateRefused as refused:
            after, code = self.ledger, refused.rule
            assert code in CODES
        self.looks_at_it_rule_by_rule(event, after)
        legal = self.naive.step(event)
        tally(code or f"legal {type(event).__name__}")
        assert legal == (code is None), (event, code)
        if not legal:
            assert after.digest == digest
        assert canonical(self.ledger) == before
        self.ledger = after

    def looks_at_it_rule_by_rule(self, event, after):
        """The short way of usual launches gives what the rules give one by one."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tracekit.gate.onward.Onward.after", lambda *_: None)
            try:
                assert canonical(transition(self.ledger, event)) == canonical(after)
            except GateRefused:
                assert after is self.ledger

    # launches

    def next_of(self, name, layer):
        """Where the rows of a layer would go on, and where an open pass would end."""
        request = self.ledger.requests.get(name)
        if request is None:
            return 0, None
        key = (layer, LAYERS[layer][0])
        if key in request.done:
            return request.ahead, None
        return request.length, request.ahead if request.done else None

    def read(self, data, name, layer, family, first, end, taken):
        request = self.ledger.requests.get(name)
        stream = None if request is None else request.streams.get((layer, family))
        version = 0 if stream is None else stream.cache_version
        if stream is not None and stream.rows != "live" and data.draw(st.booleans()):
            version += 1
        floor = self.ledger.floor((layer, family))
        version = max(version, floor) if data.draw(st.booleans()) else version
        version += data.draw(st.sampled_from([-1, 1])) if data.draw(rarely) else 0
        window = WINDOWS[layer] if family is KVFamily.RECENT else None
        oldest = 0 if stream is None or stream.rows == "lost" else stream.first
        if window is not None and data.draw(st.booleans()):
            oldest = max(oldest, first - window + 1)
        oldest = max(0, oldest + (data.draw(st.sampled_from([-1, 1])) if data.draw(rarely) else 0))
        rows = end // family.ratio
        return e.Read(
            family,
            max(version, 0),
            oldest,
            self.scales(data, stream, rows),
            self.pages(data, stream, rows, taken),
        )

    def scales(self, data, stream, rows):
        if self.scaled == data.draw(rarely):
            return None
        held = (
            ()
            if stream is None or stream.scales is None or stream.rows == "lost"
            else stream.scales.generations
        )
        count = -(-rows // BLOCK)
        force = self.ledger.scale_generation
        generations = [*held[:count], *[force] * (count - len(held))]
        if generations and data.draw(rarely):
            generations[data.draw(st.integers(0, len(generations) - 1))] = data.draw(
                st.integers(0, force + 1)
            )
        return e.Scales(BLOCK, tuple(generations))

    def pages(self, data, stream, rows, taken):
        if self.paged == data.draw(rarely):
            return None
        held = () if stream is None or stream.pages is None or stream.rows == "lost" else stream.pages.table
        count = -(-rows // PAGE)
        table = list(held[:count])
        if table and data.draw(rarely):
            table[-1] = data.draw(st.integers(0, 9))
        while len(table) < count:
            free = [page for page in range(400) if page not in taken and page not in table]
            table.append(data.draw(st.integers(0, 9)) if data.draw(rarely) else free[0])
        return e.Pages(PAGE, tuple(table))

    @rule(
        data=st.data(),
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True),
        steps=st.integers(1, 4),
        graph=often,
    )
    def serves(self, data, names, steps, graph):
        for _ in range(steps):
            for layer in LAYERS:
                if not data.draw(rarely):
                    self.launches(data, names, layer, graph)

    def launches(self, data, names, layer, graph):
        taken = {
            page
            for request in self.ledger.requests.values()
            for stream in request.streams.values()
            if stream.pages is not None
            for page in stream.pages.table
        }
        graph = graph and all(self.next_of(name, layer)[0] for name in names)
        spans = [self.span(data, name, layer, graph, taken) for name in names]
        off = data.draw(st.sampled_from([-1, 1])) if data.draw(rarely) else 0
        use = self.use(data) if graph else None
        kernel = "k" if spans[0].mode is GateMode.TRAINING else ""
        version = self.ledger.model_version + off
        self.tell(e.Attend(layer, tuple(spans), version, WINDOWS[layer], use, kernel))

    def span(self, data, name, layer, graph, taken):
        first, open_end = self.next_of(name, layer)
        request = self.ledger.requests.get(name)
        if data.draw(rarely):
            first = max(0, first + data.draw(st.integers(-3, 3)))
        mode = data.draw(st.sampled_from(list(GateMode)))
        if request is None or first == 0:
            mode = data.draw(st.sampled_from([GateMode.PREFILL, GateMode.PREFILL, GateMode.TRAINING, mode]))
        elif graph:
            mode = GateMode.GRAPH
        elif not data.draw(rarely):
            modes = [GateMode.PREFILL, GateMode.EAGER, GateMode.EAGER]
            mode = data.draw(
                st.sampled_from([*modes, GateMode.RECOMPUTE] if request.known > first else modes)
            )
        if request is not None and request.phase == "training":
            mode = GateMode.RECOMPUTE if data.draw(rarely) else GateMode.TRAINING
            first = 0
        end = (
            open_end
            if open_end is not None and not data.draw(rarely)
            else first + data.draw(st.integers(1, 6))
        )
        reads = [self.read(data, name, layer, f, first, end, taken) for f in LAYERS[layer]]
        for read in reads:
            if read.pages is not None:
                taken |= set(read.pages.table)
        if len(reads) > 1 and data.draw(rarely):
            reads.pop()
        return e.Span(name, first, end, mode, tuple(reads))

    def use(self, data):
        wrong = data.draw(st.sampled_from(["", "", "", "name", "address", "rows", "shape"]))
        return e.GraphUse(
            "h" if wrong == "name" else "g",
            (1, 3) if wrong == "address" else (1, 2),
            4 if wrong == "rows" else 6,
            ((8,), (3,)) if wrong == "shape" else ((8,), (2, 4)),
        )

    @rule(data=st.data(), kernel=st.sampled_from(["k", "k", "k", "other"]), old=rarely, keeps=st.booleans())
    def differentiates(self, data, kernel, old, keeps):
        forward = data.draw(st.sampled_from([*self.ledger.pending, 0]))
        self.tell(e.Backward(forward, kernel, self.ledger.model_version - old, keeps))

    # requests

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from([e.Preempt, e.Finish]))
    def ends(self, name, kind):
        self.tell(kind(name))

    @rule(name=st.sampled_from(NAMES), back=st.integers(-1, 8))
    def rolls_back(self, name, back):
        request = self.ledger.requests.get(name)
        self.tell(e.Rollback(name, max(0, (request.ahead if request else 0) - back)))

    @rule(name=st.sampled_from(NAMES), parent=st.sampled_from(NAMES), back=st.integers(-1, 6))
    def forks(self, name, parent, back):
        request = self.ledger.requests.get(parent)
        self.tell(e.Fork(name, parent, (request.length or request.ahead if request else 0) - back))

    @rule(
        name=st.sampled_from(NAMES),
        source=st.sampled_from([*NAMES, ""]),
        back=st.integers(-1, 6),
        old=rarely,
    )
    def adopts(self, name, source, back, old):
        request = self.ledger.requests.get(source)
        at = 4 if request is None else request.cached or request.length or request.ahead
        self.tell(e.Adopt(name, at - back, self.ledger.model_version - old, source))

    @rule(
        name=st.sampled_from(NAMES),
        whole=st.booleans(),
        layer=st.sampled_from(sorted(LAYERS)),
        before=st.integers(0, 4),
    )
    def evicts(self, name, whole, layer, before):
        self.tell(e.Evict(name, None if whole else before, layer, LAYERS[layer][0]))

    @rule(name=st.sampled_from(NAMES), step=st.integers(-1, 1))
    def migrates(self, name, step):
        self.tell(e.Migrate(name, self.ledger.model_version + step))

    # the engine

    @rule(data=st.data(), step=st.sampled_from([1, 1, 1, 0, -1]))
    def engine(self, data, step):
        """Mostly what a running engine does all the time; what voids all KV is rare."""
        layer = data.draw(st.sampled_from([None, 0, 1]))
        family = data.draw(st.sampled_from([None, KVFamily.C4]))
        version = self.ledger.floors.get((layer, family), 0) + step
        weights = self.ledger.model_version
        usual = [
            e.Fence(),
            e.Capture(e.GraphUse("g", (1, 2), 6, ((8,), (2, 4))), weights - data.draw(rarely)),
            e.Wake() if self.ledger.asleep else e.Fence(),
        ]
        rare = [
            e.NewWeights(weights + step),
            e.ResetCache(version, layer, family),
            e.Rescale(self.ledger.scale_generation + step),
            e.Sleep(data.draw(st.booleans())),
        ]
        self.tell(data.draw(st.sampled_from(rare if data.draw(often) else usual)))
        if self.ledger.asleep and data.draw(st.booleans()):
            self.tell(e.Wake())

    @invariant()
    def lengths_agree(self):
        for name, request in self.ledger.requests.items():
            mine = self.naive.requests[name]
            if request.phase != "training" and request.settled() is request:
                assert request.length == mine.slowest
            assert request.known == mine.ever or not request.closed
            assert request.cached == mine.cached


Histories.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


@pytest.mark.parametrize(
    "rule", ["attend._check_version", "attend._check_phase", "memory._check_scales", "engine._rises"]
)
def test_a_rule_that_is_left_out_is_noticed(monkeypatch, rule):
    """The second model is worth something: without the rule the two do not agree."""
    monkeypatch.setattr(f"tracekit.gate.{rule}", lambda *_: None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Histories, settings=searching(200, 40))
