"""Rollout against recompute by (request, position): exact bits, and nothing proved that was not compared."""

from dataclasses import replace

import numpy as np
import pytest

from tests.gate.engine import KEYS, Engine, flipped
from tracekit.gate.proof import CacheRows, Finding, prove
from tracekit.model import Bits, DType, KVFamily, KVRows, Lists, Mode, Origin, Output, Selection
from tracekit.providers.base import Launch
from tracekit.providers.portable import Tka1

ENGINE = Engine()
SPANS = [("a", 0, 12), ("b", 0, 12)]


def answered(call, origin=Origin.EXECUTED, sink=None):
    if sink is not None:
        call = replace(call, sink=sink)
    (tensors,) = Tka1().run(Launch((call,))).tensors
    return replace(call, out=Output(tensors.out, origin), lse=Output(tensors.lse, origin))


def rollout(sink=None):
    """A prefill of two requests and two decodes of each, in both layers."""
    calls = []
    for first, end in ((0, 10), (10, 11), (11, 12)):
        mode = Mode.PREFILL if first == 0 else Mode.DECODE
        for layer in range(2):
            spans = [(name, first, end) for name in "ab"]
            calls.append(answered(ENGINE.call(layer, spans, mode), sink=sink))
    return calls


def recompute(order=None, sink=None, spans=SPANS):
    return [answered(ENGINE.call(layer, spans, Mode.RECOMPUTE, order=order), sink=sink) for layer in range(2)]


def changed(calls, layer, **fields):
    return [replace(call, **fields) if call.layer == layer else call for call in calls]


@pytest.mark.parametrize("seed", range(3))
def test_reordered_rows_have_the_same_bytes(seed):
    proof = prove(rollout(), recompute(np.random.default_rng(seed).permutation))
    assert proof.proved
    assert {check.tensor for check in proof.checks if check.layer == 1 and check.elements} == {
        "rows", "conventions", "q", "keys", "values", "selection set", "selection order", "out", "lse",
    }  # fmt: skip
    assert proof.find("sink").finding is Finding.ABSENT


def test_a_sink_is_compared_too():
    sink = Bits(np.array([0x3F800000, 0x40000000], np.uint32), DType.FLOAT32)
    other = Bits(np.array([0x3F800000, 0x40000001], np.uint32), DType.FLOAT32)
    assert prove(rollout(sink), recompute(sink=sink)).proved
    proof = prove(rollout(sink), changed(recompute(sink=sink), 0, sink=other))
    assert [(c.tensor, c.layer) for c in proof.failed] == [("sink", 0)]
    assert prove(rollout(sink), recompute()).find("sink").finding is Finding.DIFFERS


@pytest.mark.parametrize("name", ["q", "out", "lse", "keys"])
def test_one_bit_is_found_where_it_is(name):
    calls = recompute(lambda count: np.arange(count)[::-1])
    (call,) = (call for call in calls if call.layer == 0)
    if name == "q":
        other = replace(call, q=flipped(call.q, 3))
    elif name == "keys":
        kv = {
            key: {f: KVRows(flipped(rows.keys, 3), rows.values) for f, rows in kv.items()}
            for key, kv in call.kv.items()
        }
        other = call.with_kv(kv)
    else:
        output = getattr(call, name)
        other = replace(call, **{name: Output(flipped(output.bits, 3), Origin.EXECUTED)})
    proof = prove(rollout(), [other, calls[1]])

    assert [check.tensor for check in proof.failed] == [name]
    place = proof.failed[0].place
    # rows are reversed: row 3 is position 8 of the second request; KV row 3 is KV row 3
    assert (place.request, place.position) == (str(KEYS["b"]), 3 if name == "keys" else 8)
    assert int(place.expected_bits, 16) ^ int(place.actual_bits, 16) == 1


def test_minus_zero_is_not_zero():
    calls = recompute()
    zeros = Bits(np.zeros_like(calls[0].out.bits.data), DType.BFLOAT16)
    minus = Bits(np.full_like(zeros.data, 0x8000), DType.BFLOAT16)
    base = changed(calls, 0, out=Output(zeros, Origin.EXECUTED))
    assert prove(base, base).proved
    other = changed(calls, 0, out=Output(minus, Origin.EXECUTED))
    assert prove(base, other).find("out").finding is Finding.DIFFERS


def test_the_same_nan_proves_nothing():
    data = recompute()[0].out.bits.data.copy()
    data[2, 0, 0] = 0x7FC1
    calls = changed(recompute(), 0, out=Output(Bits(data, DType.BFLOAT16), Origin.EXECUTED))
    proof = prove(calls, calls)
    assert [(c.tensor, c.finding) for c in proof.failed] == [("out", Finding.NOT_FINITE)]


def test_what_no_kernel_executed_proves_nothing():
    derived = [replace(call, lse=replace(call.lse, origin=Origin.DERIVED)) for call in recompute()]
    proof = prove(rollout(), derived)
    assert {(c.tensor, c.finding) for c in proof.failed} == {("lse", Finding.NOT_COMPARED)}


def test_a_row_that_the_rollout_never_had_is_missing():
    proof = prove(rollout(), recompute(spans=[("a", 0, 13)]))
    assert {(c.tensor, c.finding) for c in proof.failed} == {("rows", Finding.MISSING)}
    assert not prove(rollout(), recompute(spans=[("c", 0, 4)])).proved
    assert not prove(rollout(), []).proved
    assert not prove([], recompute()).proved


def test_the_same_set_in_another_order_is_only_another_order():
    call = recompute()[1]
    part = call.selection.families[KVFamily.C4]
    other = Lists.of([part.row(t)[::-1] for t in range(part.rows)])
    turned = replace(call, selection=Selection({**call.selection.families, KVFamily.C4: other}))
    proof = prove(rollout(), [recompute()[0], turned])
    assert [(c.tensor, c.layer) for c in proof.failed] == [("selection order", 1)]

    short = Lists.of([part.row(t)[:1] for t in range(part.rows)])
    cut = replace(call, selection=Selection({**call.selection.families, KVFamily.C4: short}))
    failed = prove(rollout(), [recompute()[0], cut]).failed
    assert [c.tensor for c in failed] == ["selection set", "selection order"]


# the storage tier


def quantised(codes, scales, kind="e4m3"):
    key = (0, KEYS["a"], KVFamily.DENSE)
    return {key: CacheRows(kind, 0, np.array(codes, np.uint8), np.array(scales, np.uint8))}


def value(code, scale):
    """An e4m3 code times a scale of 2^(byte - 127)."""
    table = Bits(np.array([code], np.uint8), DType.FLOAT8_E4M3FN).to_float32()[0]
    return float(table) * 2.0 ** (scale - 127)


def test_equal_values_of_other_bytes_are_equal_in_one_tier_only():
    """1.0 with scale 2 and 2.0 with scale 1 are one value and two rows of a cache."""
    one, two = quantised([[0x38]], [[128]]), quantised([[0x40]], [[127]])
    assert value(0x38, 128) == value(0x40, 127)

    proof = prove(rollout(), recompute(), base_storage=one, other_storage=two)
    assert [check.tensor for check in proof.failed] == ["storage dense"]
    assert proof.find("keys").finding is Finding.SAME
    place = proof.failed[0].place
    assert (place.expected_bits, place.actual_bits) == ("0x38", "0x40")
    assert prove(rollout(), recompute(), base_storage=one, other_storage=one).proved


@pytest.mark.parametrize(
    ("other", "finding"),
    [
        (quantised([[0x38]], [[127]]), Finding.DIFFERS),
        (quantised([[0x38]], [[128]], "e4m3fnuz"), Finding.DIFFERS),
        (quantised([[0x38, 0]], [[128]]), Finding.DIFFERS),
        (quantised(np.zeros((0, 1)), np.zeros((0, 1))), Finding.NOT_COMPARED),
    ],
)
def test_a_scale_and_a_format_are_bytes_of_a_row(other, finding):
    proof = prove(rollout(), recompute(), base_storage=quantised([[0x38]], [[128]]), other_storage=other)
    assert proof.failed[0].finding is finding
    missing = prove(rollout(), recompute(), other_storage=other)
    assert missing.failed[0].finding is Finding.MISSING
