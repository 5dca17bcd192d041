"""Random histories through a gate whose kernels run in worker processes that are killed at random.

What may come next is decided by the naive model, for launches and for every other event. A launch that is
refused never reaches the worker; one that fails, in whatever way, changes no bit of the ledger.
"""

from collections import Counter
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.gate.engine import KEYS, LENGTH, Engine, KernelProcess
from tests.gate.naive import Naive
from tests.gate.searching import searching
from tests.gate.test_failures import FAULTS, same
from tracekit.errors import GateRefused, ProviderFailed
from tracekit.gate import RequestGate
from tracekit.gate.launch import Step, attend_of
from tracekit.model import KVFamily, Mode
from tracekit.model import events as e

ENGINE = Engine()
NAMES = "abc"
FAMILY = {0: KVFamily.DENSE, 1: KVFamily.RECENT}
GRAPH = e.GraphUse("g", (1, 2), 6, ((6, 2), (6,)))
UNHURRIED = {"suppress_health_check": [HealthCheck.too_slow]}
"""Killed workers start again, which takes its time on a busy machine."""
rarely = st.integers(0, 9).map(lambda n: n == 4)


class Workers(RuleBasedStateMachine):
    """Passes of two layers over some requests, and what an engine does between them."""

    kernel: KernelProcess
    seen: Counter[str]

    def __init__(self):
        super().__init__()
        self.gate, self.naive = RequestGate(), Naive()
        self.tried = set()

    def count(self, what):
        self.seen[what] += 1

    def state(self, name):
        return self.gate.ledger.requests.get(str(KEYS[name]))

    def tell(self, event):
        before = self.gate.digest
        legal = self.naive.step(event)
        try:
            self.gate.tell(event)
        except GateRefused as refused:
            assert not legal, event
            assert self.gate.digest == before
            self.count(refused.rule)
        else:
            if not legal:  # it gives up a first launch that failed; the ledger knows nothing of either
                assert type(event) in (e.Preempt, e.Rollback), event
                assert event.request in self.tried - self.gate.ledger.requests.keys(), event
                assert self.gate.digest == before
            self.count(type(event).__name__)

    # launches

    @rule(
        data=st.data(),
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True),
        whole=st.booleans(),
        steps=st.integers(1, 2),
    )
    def serves(self, data, names, whole, steps):
        """Passes layer by layer, or each as one transaction: then both layers are committed, or none."""
        for _ in range(steps):
            if not whole:
                for layer in (0, 1):
                    self.launches(data, names, layer)
                continue
            before, saved = self.gate.digest, deepcopy(self.naive)
            try:
                with self.gate.transaction():
                    for layer in (0, 1):
                        if not self.launches(data, names, layer):
                            raise LookupError
            except LookupError:
                self.naive = saved
                assert self.gate.digest == before

    def launches(self, data, names, layer):
        """Launch one layer; whether it was committed."""
        call, graph = self.call(data, names, layer)
        if call is None:
            return False
        version = self.gate.ledger.model_version - data.draw(rarely)
        fault = data.draw(st.sampled_from([*[""] * 7, *FAULTS]))
        before, launched = self.gate.digest, self.kernel.launches
        tried = deepcopy(self.naive)
        legal = tried.step(attend_of(call, Step(call.rows), version, graph))
        self.kernel.fault = fault
        try:
            answer = self.gate.run(
                call, self.kernel, flags=self.kernel.flags, model_version=version, graph=graph
            )
        except (ArithmeticError, GateRefused, ProviderFailed) as error:
            failed = error
        else:
            failed = None
        assert (self.kernel.launches > launched) is legal  # what is refused never reached the worker
        self.tried.update(str(KEYS[name]) for name in names if legal)
        if failed is not None:
            assert not legal or isinstance(failed, FAULTS[fault])
            assert self.gate.digest == before
            self.count(fault if legal else failed.rule)
            self.kernel.fault = ""
            return False
        assert legal
        assert not fault
        assert same(answer, call)
        self.count("replayed" if graph else "launched")
        self.naive = tried
        return True

    def call(self, data, names, layer):
        """Mostly the rows that come next, in any order; sometimes they are off by one, or in another mode."""
        spans, versions, lengths = [], set(), []
        count = data.draw(st.integers(1, 4))
        for name in names:
            request = self.state(name)
            stream = None if request is None else request.streams.get((layer, FAMILY[layer]))
            computed = request is not None and (layer, FAMILY[layer]) in request.done
            training = request is not None and request.phase == "training"
            first = 0 if request is None or training else request.ahead if computed else request.length
            end = request.ahead if request is not None and request.done and not computed else first + count
            shift = data.draw(st.sampled_from([-1, 1])) if data.draw(rarely) else 0
            spans.append((name, max(0, first + shift), max(0, first + shift, end) + (end <= first + shift)))
            version = 0 if stream is None else stream.cache_version + (stream.rows == "lost")
            versions.add(version)
            lengths.append(-1 if training else first)
        if len(versions) > 1 or max(end for _, _, end in spans) > LENGTH:
            return None, None
        mode = Mode.TRAINING if -1 in lengths else Mode.DECODE if all(lengths) else Mode.PREFILL
        mode = data.draw(st.sampled_from(list(Mode))) if data.draw(rarely) else mode
        graph = None
        if mode is Mode.DECODE and data.draw(st.booleans()):
            graph = GRAPH._replace(rows=5) if data.draw(rarely) else GRAPH
        order = np.random.default_rng(data.draw(st.integers(0, 9))).permutation
        return ENGINE.call(layer, spans, mode, generation=versions.pop(), order=order), graph

    # what an engine does between launches

    @initialize(captured=st.booleans())
    def begins(self, captured):
        if captured:
            self.tell(e.Capture(GRAPH))

    @precondition(lambda self: self.gate.ledger.requests)
    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from([e.Preempt, e.Finish, e.Evict]))
    def ends(self, name, kind):
        self.tell(kind(str(KEYS[name])))

    @precondition(lambda self: self.gate.ledger.requests)
    @rule(name=st.sampled_from(NAMES), back=st.integers(-1, 5))
    def rolls_back(self, name, back):
        request = self.state(name)
        self.tell(e.Rollback(str(KEYS[name]), max(0, (request.ahead if request else 0) - back)))

    @precondition(lambda self: self.gate.ledger.requests)
    @rule(name=st.sampled_from(NAMES), parent=st.sampled_from(NAMES), back=st.integers(-1, 3))
    def forks(self, name, parent, back):
        request = self.state(parent)
        self.tell(e.Fork(str(KEYS[name]), str(KEYS[parent]), (request.length if request else 0) - back))

    @rule(data=st.data())
    def engine(self, data):
        weights = self.gate.ledger.model_version
        events = [e.Capture(GRAPH, weights), e.Fence(), e.NewWeights(weights + data.draw(st.integers(0, 1)))]
        events += [e.Sleep(True), e.Wake()] if data.draw(rarely) else []
        for event in [data.draw(st.sampled_from(events)), *([e.Wake()] if self.gate.ledger.asleep else [])]:
            self.tell(event)


@pytest.fixture(scope="module")
def kernel():
    kernel = KernelProcess()
    yield kernel
    kernel.close()


def test_random_histories_of_workers_that_die(kernel):
    Workers.kernel, Workers.seen = kernel, Counter()
    run_state_machine_as_test(
        Workers, settings=settings(max_examples=25, stateful_step_count=20, deadline=None, **UNHURRIED)
    )
    seen = Workers.seen
    assert seen["dies"] + seen["killed"], seen
    assert seen["launched"] + seen["replayed"] > 10, seen
    assert sum(code.startswith("G-") for code in seen) > 2, seen


@pytest.mark.parametrize("step", ["check_answer", "_check_flags"])
def test_a_gate_that_does_not_wait_for_the_answer_is_noticed(kernel, monkeypatch, step):
    monkeypatch.setattr(f"tracekit.gate.gate.{step}", lambda *_: None)
    Workers.kernel, Workers.seen = kernel, Counter()
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Workers, settings=searching(60, 20, **UNHURRIED))


def test_a_flag_that_is_false_after_a_graph_replay_commits_nothing(kernel):
    gate = RequestGate()
    for layer in (0, 1):
        gate.run(ENGINE.call(layer, [("a", 0, 4)]), kernel, flags=kernel.flags)
    gate.tell(e.Capture(GRAPH))
    call = ENGINE.call(0, [("a", 4, 5)], Mode.DECODE)
    before = gate.digest
    kernel.fault = "flag"
    with pytest.raises(GateRefused) as refused:
        gate.run(call, kernel, flags=kernel.flags, graph=GRAPH)
    assert (refused.value.rule, gate.digest) == ("G-FLAG", before)
    with pytest.raises(GateRefused) as refused:
        gate.run(call, kernel, flags=kernel.flags, graph=replace_shape())
    assert (refused.value.rule, gate.digest) == ("G-GRAPH-SHAPE", before)
    assert same(gate.run(call, kernel, flags=kernel.flags, graph=GRAPH), call)
    assert gate.digest != before


def replace_shape():
    return GRAPH._replace(shapes=((6, 2), (7,)))
