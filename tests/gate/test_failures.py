"""A launch that fails moves nothing, whatever the failure; its retry is held to what it was."""

from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import event as tally
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.gate.engine import KEYS, Engine, KernelProcess, flipped, pages
from tracekit.errors import GateRefused, ProviderFailed
from tracekit.gate import RequestGate
from tracekit.model import KVFamily, Mode, Ranges, Selection
from tracekit.model.events import Evict, NewWeights, Preempt, ResetCache, Rollback, Sleep, Wake
from tracekit.providers.base import Launch
from tracekit.providers.portable import Tka1

FAULTS = {
    "raises": ArithmeticError,
    "nan": GateRefused,
    "flag": GateRefused,
    "dies": ProviderFailed,
    "killed": ProviderFailed,
}
ENGINE = Engine()


@pytest.fixture(scope="module")
def kernel():
    kernel = KernelProcess()
    yield kernel
    kernel.close()


@pytest.fixture
def gate():
    return RequestGate()


def launch(gate, kernel, call, **options):
    return gate.run(call, kernel, flags=kernel.flags, **options)


def same(answer, call):
    (wanted,) = Tka1().run(Launch((call,))).tensors
    return answer.out.same(wanted.out) and answer.lse.same(wanted.lse)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_launch_moves_nothing_and_its_retry_is_the_same_launch(gate, kernel, fault):
    call = ENGINE.call(0, [("a", 0, 9)])
    before = gate.digest
    kernel.fault = fault

    with pytest.raises(FAULTS[fault]) as failed:
        launch(gate, kernel, call)
    if FAULTS[fault] is GateRefused:
        assert failed.value.rule == {"nan": "G-NON-FINITE", "flag": "G-FLAG"}[fault]
    assert gate.digest == before

    for wrong, tensor in (("q", "q"), ("keys", "dense keys")):
        with pytest.raises(GateRefused) as other:
            launch(gate, kernel, ENGINE.call(0, [("a", 0, 9)], wrong=wrong))
        assert other.value.rule == "G-RETRY-BYTES"
        assert other.value.fields == {
            "request": str(KEYS["a"]),
            "layer": 0,
            "position": 0,
            "tensor": tensor,
        }
        assert gate.digest == before
    assert same(launch(gate, kernel, call), call)
    assert gate.digest != before


def test_a_retry_writes_the_same_slots(gate, kernel):
    call = ENGINE.call(0, [("a", 0, 9)])
    there, elsewhere = (pages(call, {KEYS["a"]: table}) for table in ([3, 4, 5], [3, 4, 6]))
    kernel.fault = "dies"
    with pytest.raises(ProviderFailed):
        launch(gate, kernel, call, slots=there)

    with pytest.raises(GateRefused) as other:
        launch(gate, kernel, call, slots=elsewhere)
    assert other.value.rule == "G-RETRY-SLOTS"
    launch(gate, kernel, call, slots=there)


def test_a_retry_may_be_cut_or_mixed_otherwise(gate, kernel):
    kernel.fault = "raises"
    with pytest.raises(ArithmeticError):
        launch(gate, kernel, ENGINE.call(0, [("a", 0, 9), ("b", 0, 4)]))

    with pytest.raises(GateRefused, match="G-RETRY-BYTES"):
        launch(gate, kernel, ENGINE.call(0, [("b", 0, 6)], wrong="q"))
    launch(gate, kernel, ENGINE.call(0, [("b", 0, 6)]))
    launch(gate, kernel, ENGINE.call(0, [("a", 0, 5)]))


@pytest.mark.parametrize("event", [Rollback(str(KEYS["a"]), 0), Preempt(str(KEYS["a"])), NewWeights(1)])
def test_rows_that_are_given_up_are_not_held_to_anything(gate, kernel, event):
    launch(gate, kernel, ENGINE.call(0, [("a", 0, 4)]))
    kernel.fault = "raises"
    with pytest.raises(ArithmeticError):
        launch(gate, kernel, ENGINE.call(0, [("a", 4, 5)], Mode.DECODE))
    gate.tell(event)
    if isinstance(event, NewWeights):
        gate.tell(Preempt(str(KEYS["a"])))

    launch(gate, kernel, ENGINE.call(0, [("a", 0, 5)], generation=1, wrong="q"))


def test_a_retry_that_is_cut_short_leaves_the_rest_held(gate, kernel):
    kernel.fault = "raises"
    with pytest.raises(ArithmeticError):
        launch(gate, kernel, ENGINE.call(0, [("a", 0, 9)]))
    launch(gate, kernel, ENGINE.call(0, [("a", 0, 5)]))

    with pytest.raises(GateRefused, match="G-RETRY-BYTES"):
        launch(gate, kernel, ENGINE.call(0, [("a", 5, 9)], wrong="q"))
    launch(gate, kernel, ENGINE.call(0, [("a", 5, 9)]))


@pytest.mark.parametrize("event", [Rollback(str(KEYS["a"]), 0), Preempt(str(KEYS["a"])), NewWeights(1)])
def test_what_a_failed_transaction_gives_up_is_not_given_up(gate, kernel, event):
    launch(gate, kernel, ENGINE.call(0, [("a", 0, 4)]))
    kernel.fault = "raises"
    with pytest.raises(ArithmeticError):
        launch(gate, kernel, ENGINE.call(0, [("a", 4, 5)], Mode.DECODE))

    def told_in_vain():
        with gate.transaction():
            gate.tell(event)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        told_in_vain()

    with pytest.raises(GateRefused, match="G-RETRY-BYTES"):
        launch(gate, kernel, ENGINE.call(0, [("a", 4, 5)], Mode.DECODE, wrong="q"))
    launch(gate, kernel, ENGINE.call(0, [("a", 4, 5)], Mode.DECODE))


def test_what_a_transaction_made_good_in_part_is_held_whole_when_it_fails(gate, kernel):
    kernel.fault = "raises"
    with pytest.raises(ArithmeticError):
        launch(gate, kernel, ENGINE.call(0, [("a", 0, 9)]))

    def first_part():
        with gate.transaction():
            launch(gate, kernel, ENGINE.call(0, [("a", 0, 5)]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first_part()

    launch(gate, kernel, ENGINE.call(0, [("a", 0, 5)]))
    with pytest.raises(GateRefused, match="G-RETRY-BYTES"):
        launch(gate, kernel, ENGINE.call(0, [("a", 5, 9)], wrong="q"))


@pytest.mark.parametrize("fails_again", [True, False])
def test_other_bytes_after_a_rollback_that_is_taken_back_are_other_bytes(gate, kernel, fails_again):
    good, other = (ENGINE.call(0, [("a", 4, 5)], Mode.DECODE, wrong=wrong) for wrong in ("", "q"))
    launch(gate, kernel, ENGINE.call(0, [("a", 0, 4)]))
    kernel.fault = "raises"
    with pytest.raises(ArithmeticError):
        launch(gate, kernel, good)

    def in_vain():
        with gate.transaction():
            gate.tell(Rollback(str(KEYS["a"]), 4))
            kernel.fault = "raises" if fails_again else ""
            launch(gate, kernel, other)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        in_vain()
    with pytest.raises(GateRefused, match="G-RETRY-BYTES"):
        launch(gate, kernel, other)
    launch(gate, kernel, good)


def test_each_launch_of_a_transaction_is_held_to_its_own_bytes(gate, kernel):
    first, second = ENGINE.call(0, [("a", 0, 4)]), ENGINE.call(0, [("a", 4, 6)])

    def second_fails():
        with gate.transaction():
            launch(gate, kernel, first)
            kernel.fault = "raises"
            launch(gate, kernel, second)

    with pytest.raises(ArithmeticError):
        second_fails()

    launch(gate, kernel, first)
    with pytest.raises(GateRefused, match="G-RETRY-BYTES"):
        launch(gate, kernel, ENGINE.call(0, [("a", 4, 6)], wrong="q"))
    launch(gate, kernel, second)


def test_a_pass_is_all_layers_or_none(gate, kernel):
    before = gate.digest

    def whole():
        with gate.transaction():
            for layer in range(2):
                launch(gate, kernel, ENGINE.call(layer, [("a", 0, 9)]))

    kernel_launch, kernel.launches = kernel.run, 0

    def second_fails(what):
        kernel.fault = "dies" if kernel.launches == 1 else ""
        return kernel_launch(what)

    kernel.run = second_fails
    with pytest.raises(ProviderFailed):
        whole()
    del kernel.run
    assert gate.digest == before
    with pytest.raises(GateRefused, match="G-RETRY-BYTES"):
        launch(gate, kernel, ENGINE.call(0, [("a", 0, 9)], wrong="keys"))
    whole()
    assert gate.ledger.requests[str(KEYS["a"])].settled().length == 9


def failed_at_nine(gate, kernel):
    """Nine rows of both layers are committed; the next one of layer 0 failed."""
    for layer in range(2):
        launch(gate, kernel, ENGINE.call(layer, [("a", 0, 9)]))
    with pytest.raises(ArithmeticError):
        fails(gate, kernel, ENGINE.call(0, [("a", 9, 10)], Mode.DECODE))


def fails(gate, kernel, call, **options):
    kernel.fault = "raises"
    launch(gate, kernel, call, **options)


@contextmanager
def rolled_back(gate):
    """A transaction that fails at its end."""
    with suppress(KeyError), gate.transaction():
        yield
        raise KeyError


def refused_retry(gate, kernel, call, **options):
    before = gate.digest
    with pytest.raises(GateRefused) as refused:
        launch(gate, kernel, call, **options)
    assert gate.digest == before
    return refused.value.rule


@pytest.mark.parametrize(
    "events", [[Rollback(str(KEYS["a"]), 9)], [Preempt(str(KEYS["a"]))], [NewWeights(1)]]
)
def test_what_a_transaction_gave_up_is_held_again_when_it_fails(gate, kernel, events):
    failed_at_nine(gate, kernel)
    with rolled_back(gate):
        for event in events:
            gate.tell(event)

    other = ENGINE.call(0, [("a", 9, 10)], Mode.DECODE, wrong="q")
    assert refused_retry(gate, kernel, other) == "G-RETRY-BYTES"
    launch(gate, kernel, ENGINE.call(0, [("a", 9, 10)], Mode.DECODE))


def test_what_a_transaction_cut_short_is_held_whole_when_it_fails(gate, kernel):
    with pytest.raises(ArithmeticError):
        fails(gate, kernel, ENGINE.call(0, [("a", 0, 9)]))
    with rolled_back(gate):
        launch(gate, kernel, ENGINE.call(0, [("a", 0, 5)]))

    call = ENGINE.call(0, [("a", 0, 9)])
    late = {
        key: {f: replace(rows, keys=flipped(rows.keys, 7)) for f, rows in kv.items()}
        for key, kv in call.kv.items()
    }
    assert refused_retry(gate, kernel, call.with_kv(late)) == "G-RETRY-BYTES"
    launch(gate, kernel, call)


def test_what_failed_inside_a_transaction_is_held_after_it(gate, kernel):
    failed_at_nine(gate, kernel)
    call = ENGINE.call(1, [("a", 9, 10)], Mode.DECODE)
    with rolled_back(gate):
        with pytest.raises(ArithmeticError):
            fails(gate, kernel, call)
        gate.tell(Rollback(str(KEYS["a"]), 9))
    wrong = ENGINE.call(1, [("a", 9, 10)], Mode.DECODE, wrong="q")
    assert refused_retry(gate, kernel, wrong) == "G-RETRY-BYTES"


def test_a_shorter_retry_that_fails_too_frees_no_rows(gate, kernel):
    whole = ENGINE.call(0, [("a", 0, 9)])
    for call in (whole, ENGINE.call(0, [("a", 0, 5)])):
        with pytest.raises(ArithmeticError):
            fails(gate, kernel, call, slots=pages(call, {KEYS["a"]: [3, 4, 5]}))
    elsewhere = pages(whole, {KEYS["a"]: [3, 4, 6]})
    assert refused_retry(gate, kernel, whole, slots=elsewhere) == "G-RETRY-SLOTS"
    late = {
        key: {f: replace(rows, keys=flipped(rows.keys, 7)) for f, rows in kv.items()}
        for key, kv in whole.kv.items()
    }
    there = pages(whole, {KEYS["a"]: [3, 4, 5]})
    assert refused_retry(gate, kernel, whole.with_kv(late), slots=there) == "G-RETRY-BYTES"
    launch(gate, kernel, whole, slots=there)


@pytest.mark.parametrize(
    "events",
    [
        [Evict(str(KEYS["a"]), 2, 0, KVFamily.DENSE)],
        [Sleep(keeps_cache=True), Wake()],
        [ResetCache(0, layer=1)],
        [ResetCache(0, family=KVFamily.C4)],
    ],
)
def test_events_that_take_other_rows_free_no_attempt(gate, kernel, events):
    failed_at_nine(gate, kernel)
    for event in events:
        if isinstance(event, ResetCache):
            event = replace(event, cache_version=1)
        gate.tell(event)
    call = ENGINE.call(0, [("a", 9, 10)], Mode.DECODE, wrong="q")
    if isinstance(events[0], Evict):
        kv = {key: {f: rows.window(2, 10) for f, rows in kv.items()} for key, kv in call.kv.items()}
        part = {KVFamily.DENSE: Ranges(np.array([2]), np.array([10]))}
        call = replace(call, kv=kv, selection=Selection(part))
    assert refused_retry(gate, kernel, call) == "G-RETRY-BYTES"


@pytest.mark.parametrize("event", [Preempt(str(KEYS["a"])), Rollback(str(KEYS["a"]), 0)])
def test_a_first_launch_that_failed_can_be_given_up(gate, kernel, event):
    with pytest.raises(GateRefused, match="G-REQUEST-UNKNOWN"):
        gate.tell(event)
    call, before = ENGINE.call(0, [("a", 0, 9)]), gate.digest
    with pytest.raises(ArithmeticError):
        fails(gate, kernel, call, slots=pages(call, {KEYS["a"]: [3, 4, 5]}))
    gate.tell(event)
    assert gate.digest == before
    launch(gate, kernel, call, slots=pages(call, {KEYS["a"]: [6, 7, 8]}))


def test_a_request_that_is_preempted_while_it_runs_begins_anew_elsewhere(gate, kernel):
    call = ENGINE.call(0, [("a", 0, 9)])
    launch(gate, kernel, call, slots=pages(call, {KEYS["a"]: [3, 4, 5]}))

    class Preempts(KernelProcess):
        def run(self, what):
            gate.tell(Preempt(str(KEYS["a"])))
            return kernel.run(what)

    call = ENGINE.call(0, [("a", 9, 10)], Mode.DECODE)
    with pytest.raises(GateRefused, match="G-CONCURRENT"):
        gate.run(call, Preempts(), slots=pages(call, {KEYS["a"]: [3, 4, 5]}))
    call = ENGINE.call(0, [("a", 0, 10)], generation=1)
    launch(gate, kernel, call, slots=pages(call, {KEYS["a"]: [6, 7, 8]}))


def test_a_launch_that_runs_while_the_ledger_moves_is_not_committed(gate, kernel):
    class Meddles(KernelProcess):
        def run(self, what):
            gate.tell(NewWeights(1))
            return kernel.run(what)

    with pytest.raises(GateRefused) as refused:
        gate.run(ENGINE.call(0, [("a", 0, 4)]), Meddles())
    assert refused.value.rule == "G-CONCURRENT"
    assert not gate.ledger.requests


class Failures(RuleBasedStateMachine):
    """Passes over two layers in a transaction, in any order of rows, whose kernels fail at random."""

    kernel: KernelProcess

    def __init__(self):
        super().__init__()
        self.gate = RequestGate(prove=True)
        self.length, self.generation = {}, {}

    def spans(self, names, count):
        found = [(name, self.length.get(name, 0), self.length.get(name, 0) + count) for name in names]
        return [span for span in found if span[2] <= 64]

    @rule(
        names=st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True),
        count=st.integers(1, 5),
        faults=st.lists(st.sampled_from(["", *FAULTS]), min_size=2, max_size=2),
        seed=st.integers(0, 99),
    )
    def serve(self, names, count, faults, seed):
        spans = self.spans(names, count)
        if not spans or len({self.generation.get(name, 0) for name, _, _ in spans}) > 1:
            return
        generation = self.generation.get(spans[0][0], 0)
        mode = Mode.DECODE if all(first for _, first, _ in spans) else Mode.PREFILL
        before = self.gate.digest
        order = np.random.default_rng(seed).permutation
        try:
            with self.gate.transaction():
                for layer, fault in enumerate(faults):
                    call = ENGINE.call(layer, spans, mode, generation=generation, order=order)
                    self.kernel.fault = fault
                    assert same(launch(self.gate, self.kernel, call), call)
        except (ArithmeticError, GateRefused, ProviderFailed) as failed:
            tally(getattr(failed, "rule", "raises"))
            assert any(faults)
            assert self.gate.digest == before
            return
        assert not any(faults)
        tally("served")
        for name, _, end in spans:
            self.length[name] = end

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def preempt(self, data):
        name = data.draw(st.sampled_from(sorted(self.length)))
        if self.length[name]:
            self.gate.tell(Preempt(str(KEYS[name])))
            self.length[name], self.generation[name] = 0, self.generation.get(name, 0) + 1


def test_random_failures(kernel):
    from hypothesis.stateful import run_state_machine_as_test

    Failures.kernel = kernel
    run_state_machine_as_test(
        Failures,
        settings=settings(
            max_examples=20,
            stateful_step_count=15,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert kernel.launches > 20
