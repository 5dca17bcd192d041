"""S16 in numpy, the form to read: against float64, against autograd, and rule by rule."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tka1.cases import Array, case, f32
from tests.tka1.gradients import autograd, backward, difference, worst
from tracekit.errors import InvalidCall
from tracekit.model.bits import DType
from tracekit.providers import tka1
from tracekit.providers.tka1 import Ranges, numpy_backward
from tracekit.providers.tka1.gradients import Backward, Gradients, sum_of_sinks

CASES = (
    "causal",
    "MHA, odd dims",
    "sliding window",
    "decode",
    "two families",
    "several requests",
    "scattered leaves",
    "binary16, decode",
    "binary32, two families",
)
NAN = 0x7FC00000


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_inside_its_bound_and_so_is_autograd(name: str):
    b = backward(name, DType.FLOAT32 if name == "two families" else DType.BFLOAT16)
    assert max(worst(b, numpy_backward.run(b)).values()) <= 1
    assert max(worst(b, autograd(b)).values()) <= 1  # the bound speaks of the same mathematics


@pytest.mark.parametrize("name", ["causal", "two families"])
@pytest.mark.parametrize("what", ["scale", "sink", "a missing key"])
def test_a_wrong_backward_is_outside_its_bound(name: str, what: str):
    """The control: each kind of gradient leaves its bound when the launch is another one."""
    b = backward(name)
    inputs = b.inputs
    scale = float(np.uint32(inputs.scale_bits).view(np.float32))
    family = inputs.families[-1]
    other = {
        "scale": lambda: replace(inputs, scale_bits=int(f32(scale * 1.02)[0])),
        "sink": lambda: replace(inputs, sink=f32(*(inputs.sink.view(np.float32) + 0.7))),
        "a missing key": lambda: replace(
            inputs,
            families=(
                *inputs.families[:-1],
                replace(family, selection=Ranges(family.selection.lo + 1, family.selection.hi)),
            ),
        ),
    }[what]()
    found = worst(b, numpy_backward.run(replace(b, inputs=other)))
    for kind, ratio in found.items():
        assert ratio > 1 or (kind == "dV" and name == "two families"), kind  # there dK is dK + dV


def rows_of(b: Backward, grads: Gradients, order: Array) -> Gradients:
    return replace(grads, d_q=grads.d_q[order])


@pytest.mark.parametrize("name", ["several requests", "two families", "wild", "scattered leaves"])
def test_the_order_of_a_batch_changes_no_bit(name: str):
    b = backward(name)
    want = numpy_backward.run(b)
    rows = np.arange(len(b.inputs.q))
    for order in (rows[::-1], np.roll(rows, 3), np.random.default_rng(5).permutation(rows)):
        assert difference(numpy_backward.run(b.take(order)), rows_of(b, want, order)) == ""


def test_other_requests_change_no_bit():
    b = backward("several requests")
    want = numpy_backward.run(b)
    for request in (0, 1, 2):
        mine = np.flatnonzero(b.inputs.request == request)
        alone = numpy_backward.run(b.take(mine))
        assert np.array_equal(alone.d_q, want.d_q[mine])
        assert np.array_equal(alone.families[0].keys[request], want.families[0].keys[request])
        assert np.array_equal(alone.families[0].values[request], want.families[0].values[request])


def test_a_row_alone_gives_its_dq_and_legally_another_dkv():
    b = backward("causal")
    want = numpy_backward.run(b)
    total = np.zeros(want.families[0].keys[0].shape, np.float32)
    for t in range(len(b.inputs.q)):
        alone = numpy_backward.run(b.take([t]))
        assert np.array_equal(alone.d_q[0], want.d_q[t])
        total += alone.families[0].keys[0].view(np.float32)
    assert not np.array_equal(total.view(np.uint32), want.families[0].keys[0])


def test_the_leaf_is_the_position_and_not_the_place_among_the_rows():
    """Shifted by one leaf no sum changes; across the border of a leaf some do."""
    b = replace(backward("causal"), positions=np.arange(100, 109))
    want = numpy_backward.run(b)
    moved = [
        numpy_backward.run(replace(b, positions=b.positions + shift)).families[0].keys[0]
        for shift in (256, 19, 24)
    ]
    same = [np.array_equal(x, want.families[0].keys[0]) for x in moved]
    assert same == [True, True, False]  # 119 .. 127 is one leaf still; 124 .. 132 is two


def test_a_row_that_sees_nothing_adds_nothing():
    b = backward("causal")
    seen = b.inputs.families[0].selection
    blind = Ranges(np.append(seen.lo, 0), np.append(seen.hi, 0))
    inputs = replace(
        b.inputs,
        q=np.concatenate([b.inputs.q, b.inputs.q[:1]]),
        request=np.append(b.inputs.request, 0).astype(np.int32),
        families=(replace(b.inputs.families[0], selection=blind),),
    )
    more = Backward(inputs, np.append(b.positions, 399), np.concatenate([b.d_out, b.d_out[:1]]))
    got, want = numpy_backward.run(more), numpy_backward.run(b)
    assert not got.d_q[-1].any()  # +0, not -0
    assert difference(replace(got, d_q=got.d_q[:-1]), want) == ""


def test_special_sinks():
    """Rule 1: +inf leaves no terms, -inf has none of its own, NaN poisons its head alone."""
    b = backward("causal")
    sink = b.inputs.sink.copy()
    sink[:3] = 0x7F800000, 0xFF800000, 0xFFC12345
    got = numpy_backward.run(replace(b, inputs=replace(b.inputs, sink=sink)))
    plain = numpy_backward.run(replace(b, inputs=replace(b.inputs, sink=None)))
    assert not got.d_q[:, 0].any()
    assert np.array_equal(got.d_q[:, 1], plain.d_q[:, 1])
    assert (got.d_q[:, 2] == NAN).all()
    assert got.d_sink[0, :3].tolist() == [0, 0, NAN]
    assert np.isfinite(got.d_sink.view(np.float32)[0, 3:]).all()
    seen = b.inputs.families[0].selection.hi.max()
    assert (got.families[0].keys[0][:seen, 1] == NAN).all()  # kv head 1 is read by heads 2 and 3
    assert np.isfinite(got.families[0].keys[0].view(np.float32)[:, [0, 2]]).all()


def test_a_poisoned_row_spoils_what_it_sees_and_nothing_else():
    b = backward("several requests")
    q = b.inputs.q.copy()
    q[2, 0, 5] = 0x7FC1  # head 0 of row 2, request 1
    got = numpy_backward.run(replace(b, inputs=replace(b.inputs, q=q)))
    want = numpy_backward.run(b)
    selection = b.inputs.families[0].selection
    hit = np.zeros(len(b.inputs.families[0].keys[1]), bool)
    hit[selection.lo[2] : selection.hi[2]] = True
    assert (got.d_q[2, 0] == NAN).all()
    assert (got.families[0].keys[1][hit, 0] == NAN).all()
    clean = got.families[0].keys[1][~hit, 0]
    assert np.array_equal(clean, want.families[0].keys[1][~hit, 0])
    assert np.array_equal(got.families[0].keys[0], want.families[0].keys[0])


def test_the_gradient_of_shared_keys_and_values_is_their_sum():
    b = backward("two families")
    apart = tuple(replace(f, values=tuple(v.copy() for v in f.values)) for f in b.inputs.families)
    two = numpy_backward.run(replace(b, inputs=replace(b.inputs, families=apart)))
    for one, f in zip(numpy_backward.run(b).families, two.families, strict=True):
        assert one.keys[0] is one.values[0]
        summed = f.keys[0].view(np.float32) + f.values[0].view(np.float32)
        assert np.array_equal(one.keys[0], summed.view(np.uint32))


@given(st.permutations(range(5)))
def test_the_sink_of_a_launch_is_a_chain_in_the_order_that_is_given(order: list[int]):
    d_sink = f32(1e8, 1.0, -1e8, 3.0, 2.0**-30).reshape(5, 1)
    total = np.float32(0)
    for r in order:
        total = total + d_sink[r, 0].view(np.float32)
    assert sum_of_sinks(d_sink, order)[0] == total.view(np.uint32)
    with pytest.raises(InvalidCall) as error:
        sum_of_sinks(d_sink, order[1:])
    assert error.value.rule == "S16-ORDER"


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("S16-DTYPE", lambda b: {"dtype": DType.FLOAT32}),
        ("S16-DTYPE", lambda b: {"dtype": DType.FLOAT8_E4M3FN}),
        ("S16-SHAPE", lambda b: {"d_out": b.d_out[:, :, :-1]}),
        ("S16-SHAPE", lambda b: {"rows": tka1.partials(case("decode"))}),
        ("S16-POSITION", lambda b: {"positions": b.positions[:-1]}),
        ("S16-POSITION", lambda b: {"positions": b.positions * 0}),
        ("S16-POSITION", lambda b: {"positions": b.positions - 500}),
        ("S16-POSITION", lambda b: {"positions": b.positions.astype(np.int32)}),
    ],
)
def test_bad_input_is_refused_by_name(rule: str, change):
    b = backward("causal")
    with pytest.raises(InvalidCall) as error:
        replace(b, **change(b))
    assert error.value.rule == rule
