"""`diff` on training traces: each gradient is compared, and one that only one side has is told."""

from dataclasses import replace

import pytest

from tests.compare.test_diff import Memory, trace
from tracekit.compare.diff import compare_traces
from tracekit.model import AttentionCall, Bits, DType, Gradients, Origin, Output
from tracekit.providers.base import Launch
from tracekit.providers.oracle import Oracle
from tracekit.testing.build import dense_call
from tracekit.verdict import Exit

TENSORS = ("d_out", "d_q", "d_keys", "d_values", "d_sink")


def trained(lengths: tuple[int, ...] = (7, 5)) -> Memory:
    """A training step: the gradients are any numbers, of the shapes that they have."""
    call = dense_call(lengths=lengths, sink=True, seed=3)
    (answer,) = Oracle().run(Launch((call,))).tensors
    ran = trace(replace(call, out=None, lse=None))
    (named,) = ran.calls
    grads = Gradients(answer.out, named.q, named.kv, Bits(named.sink.data, DType.FLOAT32))
    done = replace(named, out=Output(answer.out, Origin.EXECUTED), grads=grads)
    return Memory((done,), ran.recording)


def with_bit(call: AttentionCall, tensor: str) -> AttentionCall:
    grads = call.grads
    if tensor in ("d_keys", "d_values"):
        key = call.rows.requests[1]
        ((family, rows),) = grads.d_kv[key].items()
        name = tensor.removeprefix("d_")
        changed = replace(rows, **{name: flipped(getattr(rows, name))})
        return replace(call, grads=replace(grads, d_kv={**grads.d_kv, key: {family: changed}}))
    return replace(call, grads=replace(grads, **{tensor: flipped(getattr(grads, tensor))}))


def flipped(bits: Bits) -> Bits:
    data = bits.data.copy()
    data.reshape(-1)[-1] ^= 1
    return Bits(data, bits.dtype)


def test_equal_gradients_are_compared():
    found = compare_traces(trained(), trained())

    assert {part.tensor: part.verdict for part in found.parts if part.tensor in TENSORS} == dict.fromkeys(
        TENSORS, "equal"
    )
    assert found.exit_code == Exit.OK


@pytest.mark.parametrize("tensor", TENSORS)
def test_one_bit_of_a_gradient_is_named(tensor):
    ours, theirs = trained(), trained()
    found = compare_traces(ours, Memory((with_bit(theirs.calls[0], tensor),), theirs.recording))

    assert found.exit_code == Exit.REFUTED
    assert (found.first.tensor, found.first.differences.elements) == (tensor, 1)


@pytest.mark.parametrize("turned", [False, True])
def test_gradients_of_one_side_are_told(turned):
    ours, theirs = trained(), trained()
    sides = [ours, Memory((replace(theirs.calls[0], grads=None),), theirs.recording)]
    found = compare_traces(*(reversed(sides) if turned else sides))

    assert found.exit_code == Exit.INCONCLUSIVE
    assert f"only in {'target' if turned else 'base'}: gradients, of layers 0" in found.notes


@pytest.mark.parametrize("tensor", ["d_q", "d_sink", "d_kv"])
def test_a_gradient_that_one_side_lacks_is_not_equal(tensor):
    ours, theirs = trained(), trained()
    (call,) = theirs.calls
    lacking = replace(call, grads=replace(call.grads, **{tensor: {} if tensor == "d_kv" else None}))
    found = compare_traces(ours, Memory((lacking,), theirs.recording))

    assert found.first is None
    assert found.exit_code == Exit.INCONCLUSIVE
