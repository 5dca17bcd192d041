"""Gradients come long after their launch: they reach its call, and one that lacks them is told."""

import numpy as np

from tracekit.model import (
    Bits,
    Conventions,
    DType,
    ExecutedIdentity,
    KVFamily,
    KVRows,
    Mode,
    Provenance,
    Ranges,
    Selection,
    scale_to_bits,
)
from tracekit.recorder.observation import Borrowed, LateGradients, Observation, SeenKV
from tracekit.recorder.session import Session

ROWS, HEADS, DIM = 3, 2, 4


def numbers(*shape, seed=0):
    return Bits.from_float32(np.random.default_rng(seed).normal(size=shape), DType.FLOAT32)


def observe(session, handle, late, layer=0):
    kv = numbers(1, ROWS, DIM, seed=1)
    positions = np.arange(ROWS)
    session.observe(
        Observation(
            layer=layer,
            requests=(handle,),
            request=np.zeros(ROWS, np.int32),
            positions=positions,
            q=numbers(ROWS, HEADS, DIM),
            kv={handle: {KVFamily.DENSE: SeenKV(Borrowed(kv.data, kv.dtype), None)}},
            sink=None,
            selection=Selection({KVFamily.DENSE: Ranges(np.zeros(ROWS, np.int64), positions + 1)}),
            out=None,
            lse=None,
            conventions=Conventions(scale_to_bits(0.5)),
            provenance=Provenance("test 1.0", "test", ExecutedIdentity("test")),
            gradients=late,
        )
    )


def step(session):
    handle = session.requests.open()
    session.begin({handle: np.arange(ROWS)}, mode=Mode.TRAINING)
    return handle


def test_gradients_that_come_after_the_step_reach_their_call():
    session, late = Session(), LateGradients()
    session.rank = 1
    handle = step(session)
    observe(session, handle, late)
    session.end()
    late.d_out, late.d_q = numbers(ROWS, HEADS, DIM, seed=2), numbers(ROWS, HEADS, DIM, seed=3)
    late.d_kv = {handle: {KVFamily.DENSE: KVRows(numbers(ROWS, 1, DIM, seed=4), None)}}

    recording, (call,) = session.finish()

    assert call.rank == 1
    assert call.grads.d_out is late.d_out
    assert call.grads.d_kv[call.rows.requests[0]][KVFamily.DENSE].keys.same(numbers(ROWS, 1, DIM, seed=4))
    assert (session.problems, recording.notes) == ([], {})


def test_a_backward_that_never_came_is_told_and_leaves_the_forward_alone():
    session, came = Session(), LateGradients()
    handle = step(session)
    for layer, late in enumerate((came, LateGradients(), None)):
        observe(session, handle, late, layer)
    came.d_out = numbers(ROWS, HEADS, DIM, seed=2)

    recording, calls = session.finish()

    assert [call.grads is not None for call in calls] == [True, False, False]
    assert recording.notes["gradients"] == "missing of 1 of 2 calls, their backward never ran"
    assert session.problems == ["gradients are missing of 1 of 2 calls, their backward never ran"]
    assert recording.ledger[0].complete
