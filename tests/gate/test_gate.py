"""`RequestGate` around a kernel: rows in any order, proof of bytes, and answers that are none."""

from dataclasses import replace

import numpy as np
import pytest

import tracekit
from tests.gate.engine import KEYS, WINDOW, Engine, flipped
from tracekit.errors import GateRefused, UsageError
from tracekit.gate import RequestGate
from tracekit.model import Bits, DType, KVFamily, KVRows, Lists, Mode, Ranges, Selection
from tracekit.model.events import Evict, Finish, NewWeights, Preempt, Rollback
from tracekit.providers.base import Answer, Launch, Tensors
from tracekit.providers.portable import Tka1

ENGINE = Engine()
A = str(KEYS["a"])


class Answers(Tka1):
    """TKA-1 whose answer is changed on the way."""

    def __init__(self, change):
        self.change = change

    def run(self, launch):
        (tensors,) = super().run(launch).tensors
        return Answer((self.change(tensors),), self.identity())


def served(gate, *, decode=3):
    """A prefill of 9 rows and some decodes, over both layers."""
    for layer in range(2):
        gate.run(ENGINE.call(layer, [("a", 0, 9)]), Tka1())
    for position in range(9, 9 + decode):
        for layer in range(2):
            gate.run(ENGINE.call(layer, [("a", position, position + 1)], Mode.DECODE), Tka1())


def code(gate, call, provider=None, **options):
    before = gate.digest
    with pytest.raises(GateRefused) as refused:
        gate.run(call, provider or Tka1(), **options)
    assert gate.digest == before
    return refused.value.rule


def test_it_is_the_public_name():
    assert tracekit.RequestGate is RequestGate
    assert tracekit.events.Preempt is Preempt


def test_answers_go_through_as_they_are():
    gate = RequestGate()
    served(gate)
    call = ENGINE.call(1, [("b", 0, 20)])
    answer = gate.run(call, Tka1())
    (wanted,) = Tka1().run(Launch((call,))).tensors
    assert answer.out.same(wanted.out)
    assert gate.ledger.requests[A].length == 12


def test_the_order_of_rows_is_nothing_to_the_ledger():
    digests = set()
    for seed in range(4):
        gate = RequestGate()
        order = np.random.default_rng(seed).permutation
        for layer in range(2):
            gate.run(ENGINE.call(layer, [("a", 0, 9), ("b", 0, 5)], order=order), Tka1())
        digests.add(gate.digest)
    assert len(digests) == 1


def test_rows_with_a_hole_are_refused():
    call = ENGINE.call(0, [("a", 0, 9)], order=lambda count: [0, 1, 3, 4])
    assert code(RequestGate(), call) == "G-ROWS-GAP"


def test_a_request_that_brings_too_few_rows_is_refused():
    call = ENGINE.call(1, [("a", 0, 9)])
    short = {key: {f: rows.until(8 // f.ratio) for f, rows in kv.items()} for key, kv in call.kv.items()}
    zeros = np.zeros(9, np.int64)
    cut = Selection({KVFamily.RECENT: Ranges(zeros, zeros), KVFamily.C4: Ranges(zeros, zeros)})
    assert code(RequestGate(), replace(call, kv=short, selection=cut)) == "G-KV-MISSING"


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda t: Tensors(t.out.part(slice(1, None)), t.lse), "G-SHAPE"),
        (lambda t: Tensors(Bits(t.out.data.astype(np.uint32), DType.FLOAT32), t.lse), "G-SHAPE"),
        (lambda t: Tensors(t.out, t.lse.part(slice(1, None))), "G-SHAPE"),
        *[
            (lambda t, b=bits: Tensors(t.out, patched(t.lse, b)), "G-NON-FINITE")
            for bits in (0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 0xFFFFFFFF)
        ],
        *[
            (lambda t, b=bits: Tensors(patched(t.out, b), t.lse), "G-NON-FINITE")
            for bits in (0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81)
        ],
    ],
)
def test_an_answer_that_is_none_is_not_committed(change, wanted):
    assert code(RequestGate(), ENGINE.call(0, [("a", 0, 9)]), Answers(change)) == wanted


@pytest.mark.parametrize("times", [0, 2])
def test_one_call_has_one_answer(times):
    class Several(Tka1):
        def run(self, launch):
            answer = super().run(launch)
            return replace(answer, tensors=answer.tensors * times)

    assert code(RequestGate(), ENGINE.call(0, [("a", 0, 9)]), Several()) == "G-SHAPE"


@pytest.mark.parametrize("bits", [0x0000, 0x8000, 0x7F7F, 0xFF7F, 0x0001, 0x8001])
def test_the_finite_numbers_at_the_edges_pass(bits):
    gate = RequestGate()
    gate.run(ENGINE.call(0, [("a", 0, 9)]), Answers(lambda t: Tensors(patched(t.out, bits), t.lse)))
    assert gate.ledger.epoch == 1


@pytest.mark.parametrize("bits", [0x80000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00000001, 0x807FFFFF])
def test_the_finite_numbers_at_the_edges_of_an_lse_pass(bits):
    gate = RequestGate()
    gate.run(ENGINE.call(0, [("a", 0, 9)]), Answers(lambda t: Tensors(t.out, patched(t.lse, bits))))
    assert gate.ledger.epoch == 1


def patched(bits, pattern):
    data = bits.data.copy()
    data[3, 1] = pattern
    return Bits(data, bits.dtype)


def test_a_row_without_keys_may_have_any_lse():
    call = ENGINE.call(0, [("a", 0, 9)])
    part = call.selection.families[KVFamily.DENSE]
    hi = part.hi.copy()
    hi[3] = 0
    empty = replace(call, selection=Selection({KVFamily.DENSE: Ranges(part.lo, hi)}))
    gate = RequestGate()
    answer = gate.run(empty, Tka1())
    assert np.isneginf(answer.lse.to_float32()[3]).all()


# the proof of bytes


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_recompute_in_another_order_has_the_same_bytes(seed):
    gate = RequestGate(prove=True)
    served(gate)
    gate.tell(Finish(A))
    order = None if seed is None else np.random.default_rng(seed).permutation
    for layer in (1, 0):
        gate.run(ENGINE.call(layer, [("a", 0, 12)], Mode.RECOMPUTE, order=order), Tka1())


@pytest.mark.parametrize(
    ("layer", "wrong", "change", "tensor"),
    [
        (0, "q", None, "q"),
        (0, "keys", None, "dense keys"),
        (0, None, lambda t: Tensors(flipped(t.out, 7), t.lse), "out"),
        (0, None, lambda t: Tensors(t.out, flipped(t.lse, 7)), "lse"),
        (1, None, lambda t: Tensors(flipped(t.out, 11), t.lse), "out"),
    ],
)
def test_other_bytes_are_refused_with_their_place(layer, wrong, change, tensor):
    gate = RequestGate(prove=True)
    served(gate)
    gate.tell(Finish(A))
    provider = Tka1() if change is None else Answers(change)
    before = gate.digest
    with pytest.raises(GateRefused) as refused:
        gate.run(ENGINE.call(layer, [("a", 0, 12)], Mode.RECOMPUTE, wrong=wrong), provider)
    assert refused.value.rule == "G-BYTES"
    assert refused.value.fields["tensor"] == tensor
    assert refused.value.fields["layer"] == layer
    assert gate.digest == before


def test_another_order_of_the_same_selection_is_another_thing_than_another_set():
    def told(lists):
        gate = RequestGate(prove=True)
        served(gate, decode=0)
        gate.tell(Finish(A))
        call = ENGINE.call(1, [("a", 0, 9)], Mode.RECOMPUTE)
        part = {**call.selection.families, KVFamily.C4: Lists.of(lists(call))}
        with pytest.raises(GateRefused) as refused:
            gate.run(replace(call, selection=Selection(part)), Tka1())
        return refused.value.fields["tensor"]

    assert told(lambda call: [np.arange((t + 1) // 4) for t in range(9)]) in ("selection order", "out", "lse")
    assert told(lambda call: [np.arange(min((t + 1) // 4, 1)) for t in range(9)]) != "selection order"


def test_a_preempted_request_is_held_to_its_bytes_and_a_new_prefill_under_new_weights_is_not():
    gate = RequestGate(prove=True)
    served(gate, decode=0)
    gate.tell(Preempt(A))
    again = ENGINE.call(0, [("a", 0, 9)], Mode.RECOMPUTE, generation=1, wrong="q")
    assert code(gate, again) == "G-BYTES"
    gate.tell(NewWeights(1))
    gate.run(ENGINE.call(0, [("a", 0, 9)], generation=1, wrong="q"), Tka1())


def test_rows_that_were_rolled_back_may_be_other_rows():
    gate = RequestGate(prove=True)
    served(gate, decode=0)
    gate.tell(Rollback(A, 8))
    gate.run(ENGINE.call(0, [("a", 8, 9)], Mode.DECODE, wrong="q"), Tka1())


def test_compressed_rows_that_were_rolled_back_may_be_other_rows():
    gate = RequestGate(prove=True)
    served(gate, decode=3)
    gate.tell(Rollback(A, 11))  # row 2 of C4 ends at position 11
    call = ENGINE.call(1, [("a", 11, 12)], Mode.DECODE)
    held = {
        f: replace(rows, keys=flipped(rows.keys, 2)) if f is KVFamily.C4 else rows
        for f, rows in call.kv[KEYS["a"]].items()
    }
    gate.run(call.with_kv(dict.fromkeys(call.kv, held)), Tka1())


def test_an_overwritten_cache_row_is_seen_at_the_next_decode():
    gate = RequestGate(prove=True)
    served(gate)
    call = ENGINE.call(0, [("a", 12, 13)], Mode.DECODE)
    kv = {
        key: {f: type(rows)(flipped(rows.keys, 5), rows.values) for f, rows in families.items()}
        for key, families in call.kv.items()
    }
    with pytest.raises(GateRefused) as refused:
        gate.run(call.with_kv(kv), Tka1())
    assert refused.value.fields == {"request": A, "layer": 0, "position": 5, "tensor": "dense keys"}


def test_a_name_that_was_evicted_may_have_other_bytes():
    gate = RequestGate(prove=True)
    served(gate, decode=0)
    for event in (Finish(A), Evict(A)):
        gate.tell(event)
    gate.run(ENGINE.call(0, [("a", 0, 9)], wrong="q"), Tka1())


def test_a_kernel_that_writes_to_its_input_proves_nothing():
    class Writes(Tka1):
        def run(self, launch):
            answer = super().run(launch)
            launch.calls[0].q.data.base.flat[0] ^= 1
            return answer

    assert code(RequestGate(prove=True), ENGINE.call(0, [("a", 0, 9)]), Writes()) == "G-BYTES"


@pytest.mark.parametrize("version", [1.0, np.float64(1), "1"])
def test_a_version_that_is_no_integer_is_not_cut_to_one(version):
    gate = RequestGate()
    gate.tell(NewWeights(1))
    before, call = gate.digest, ENGINE.call(0, [("a", 0, 9)])
    with pytest.raises(TypeError):
        gate.run(call, Tka1(), model_version=version)
    if not isinstance(version, str):
        half = {
            key: {f: replace(rows, generation=version) for f, rows in kv.items()}
            for key, kv in call.kv.items()
        }
        with pytest.raises(TypeError):
            gate.run(call.with_kv(half), Tka1())
    assert gate.digest == before


def test_a_wider_window_does_not_read_rows_that_the_narrow_one_dropped():
    gate = RequestGate()
    served(gate)
    call = ENGINE.call(1, [("a", 12, 13)], Mode.DECODE)
    oldest = gate.ledger.requests[A].streams[1, KVFamily.RECENT].first
    held = ENGINE.recent["a"].part(slice(oldest, 13))
    kv = {key: {**kv, KVFamily.RECENT: KVRows(held, None, oldest)} for key, kv in call.kv.items()}
    wide = replace(call.with_kv(kv), conventions=replace(call.conventions, window=2 * WINDOW))
    assert code(gate, wide) == "G-KV-MISSING"


def test_a_window_that_forgot_too_much_is_refused():
    gate = RequestGate()
    served(gate)
    call = ENGINE.call(1, [("a", 12, 13)], Mode.DECODE)
    (key,) = call.kv
    families = dict(call.kv[key])
    families[KVFamily.RECENT] = families[KVFamily.RECENT].window(12 - WINDOW + 3, 13)
    part = {**call.selection.families, KVFamily.RECENT: Ranges(np.array([12 - WINDOW + 3]), np.array([13]))}
    cut = replace(call, kv={key: families}, selection=Selection(part))
    assert code(gate, cut) == "G-KV-MISSING"


def test_transactions_do_not_nest():
    gate = RequestGate()
    with gate.transaction(), pytest.raises(UsageError) as refused, gate.transaction():
        pass
    assert refused.value.rule == "G-NESTED"
