"""Faults of jobs and of backwards: each is refuted by the claim that is about it, on a call that shows it."""

import numpy as np
import pytest

from tracekit.controls.backward import SumsInArrival
from tracekit.controls.backward_short import Bfloat16Sums
from tracekit.controls.base import Correct
from tracekit.controls.cp import Bfloat16Partials
from tracekit.controls.partial_arrival import MergeInArrival
from tracekit.controls.partial_gap import LastPartialLost
from tracekit.controls.partial_sinks import SinkInEveryPartial
from tracekit.controls.partial_twice import FirstPartialTwice
from tracekit.controls.splits import BaseTwoPartials
from tracekit.model import DType
from tracekit.providers.base import Execution, Launch
from tracekit.providers.split import Split
from tracekit.relations import relation
from tracekit.testing import RelationSuite, dense_call, sparse_call, with_d_out

FAULTS = (
    BaseTwoPartials,
    Bfloat16Partials,
    SinkInEveryPartial,
    MergeInArrival,
    LastPartialLost,
    FirstPartialTwice,
)
LONG = dense_call(dtype=DType.FLOAT32, lengths=(600, 290), new=(2, 2), sink=True, seed=8)


class Judge(RelationSuite):
    """The judgement of the suite, outside a test class."""


def refuted(claim: str, kernel, call) -> bool:
    judge = Judge()
    judge.relation = relation(claim)
    return judge._judge(kernel, call).first is not None


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("claim", ["splits", "cp"])
def test_a_fault_in_the_merge_is_refuted_by_splits_and_by_cp(claim: str, fault):
    assert refuted(claim, fault(), LONG)
    assert not refuted(claim, Correct(), LONG)


@pytest.mark.parametrize("claim", ["rows", "solo", "threads", "rerun"])
def test_no_claim_about_one_process_sees_them(claim: str):
    assert not any(refuted(claim, fault(), LONG) for fault in FAULTS)


def test_arrival_hides_behind_two_partials():
    """Why it is not the twin of a claim: a merge of two commutes."""
    two = dense_call(dtype=DType.FLOAT32, lengths=(200,), new=(1,), sink=True, seed=8)
    assert not refuted("splits", MergeInArrival(), two)


@pytest.mark.parametrize("fault", [SumsInArrival, Bfloat16Sums])
def test_a_backward_in_the_order_of_arrival_is_refuted(fault):
    for call in (dense_call(lengths=(20, 11), sink=True, seed=1), sparse_call(lengths=(40, 25), seed=3)):
        call = with_d_out(call)
        assert refuted("backward", fault(), call)
        assert not refuted("backward", Correct(), call)
        assert not refuted("grad", fault(), call)


def test_a_sink_in_every_partial_gives_the_factor_of_the_report():
    """Scores .5 and 2 in two splits, a sink of 1: O is .769 of O without a sink, and .624 with two sinks."""
    from dataclasses import replace

    from tracekit.model import Bits, KVFamily, KVRows, Lists, Selection, scale_to_bits

    call = dense_call(lengths=(200,), new=(1,), heads=1, kv_heads=1, head_dim=1, sink=True)
    keys = np.zeros((200, 1, 1), np.float32)
    keys[[0, 199]] = np.array([0.5, 2.0]).reshape(2, 1, 1)
    held = KVRows(Bits.from_float32(keys, DType.BFLOAT16), Bits.from_float32(keys * 0 + 1, DType.BFLOAT16))
    call = replace(
        call,
        q=Bits.from_float32(np.ones((1, 1, 1)), DType.BFLOAT16),
        kv={call.rows.requests[0]: {KVFamily.DENSE: held}},
        sink=Bits.from_float32(np.ones(1), DType.FLOAT32),
        selection=Selection({KVFamily.DENSE: Lists.of([np.array([0, 199])])}),
        conventions=replace(call.conventions, scale_bits=scale_to_bits(1.0)),
    )
    how = Execution(split=Split(rows=128))
    out = [
        float(kernel.run(Launch((call,), how)).tensors[0].out.to_float32().item())
        for kernel in (Correct(), SinkInEveryPartial())
    ]
    assert out == pytest.approx([0.769, 0.624], abs=2e-3)
