"""What a replay says of what was recorded: bits that come again, evidence, and captures that are cut."""

from dataclasses import replace

import numpy as np
import pytest

from tests.replayer.faulty import PlanDecides
from tests.replayer.three import PREFILL, TKA1, TRACE
from tracekit.model import (
    Bits,
    ExecutedIdentity,
    LaunchPlan,
    Origin,
    Output,
    Provenance,
    Recording,
    StepRecord,
)
from tracekit.providers.registry import create
from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call, record
from tracekit.verdict import Exit, Status


def test_an_lse_that_was_recorded_and_does_not_come_again_is_missed():
    one = MemoryTrace((record(dense_call(lengths=(5,), new=(1,)), create("oracle")),))

    verdict = replay([one], providers=["tests.replayer.faulty:LosesLse"], claims=["recorded"]).find(
        "recorded"
    )

    assert verdict.status is Status.INCONCLUSIVE
    assert verdict.reason == "the lse is missing in variant `as recorded` of call 0"


def test_recorded_needs_the_identity_that_was_recorded():
    other = Provenance("in memory", "tka1", ExecutedIdentity("tka1", {"tka1": "2"}))
    drifted = MemoryTrace((replace(PREFILL, provenance=other),))

    verdict = replay([drifted], providers=["tka1"], claims=["recorded"]).find("recorded")

    assert verdict.status is Status.NOT_RUN
    assert verdict.reason == "another build answered: tka1 2 recorded, 1 here"


def test_the_control_of_recorded_is_the_judged_answer_against_the_trace():
    """O is +0 everywhere: a twin that computes anew and clears the last bit would not differ."""
    call = dense_call(lengths=(4,), kv_heads=1, seed=6)
    kv = {
        key: {
            family: replace(rows, values=Bits(np.zeros_like(rows.value_bits.data), call.dtype))
            for family, rows in families.items()
        }
        for key, families in call.kv.items()
    }
    zero = replace(record(call.with_kv(kv), TKA1), lse=None)

    verdict = replay([MemoryTrace((zero,))], providers=["tka1"], claims=["recorded"]).find("recorded")

    assert not zero.out.bits.data.any()
    assert verdict.status is Status.HELD
    assert verdict.control == "twin-recorded refuted"


def test_recorded_refutes_one_changed_bit():
    data = PREFILL.out.bits.data.copy()
    data[4, 2, 7] ^= 1
    changed = replace(PREFILL.out, bits=replace(PREFILL.out.bits, data=data))
    trace = MemoryTrace((replace(PREFILL, out=changed),))

    verdict = replay([trace], providers=["tka1"], claims=["recorded"]).find("recorded")

    assert verdict.status is Status.REFUTED
    assert verdict.first is not None
    assert (verdict.first.position, verdict.first.head, verdict.first.element) == (4, 2, 7)
    assert verdict.first.expected_bits == f"{data[4, 2, 7]:#06x}"
    assert (verdict.differences.elements, verdict.differences.rows) == (1, 1)


@pytest.mark.parametrize("claim", ["recorded", "control"])
def test_a_derived_output_is_no_evidence(claim):
    derived = replace(PREFILL, out=Output(PREFILL.out.bits, Origin.DERIVED))
    provider = {"recorded": "tka1", "control": "trace"}[claim]

    verdict = replay([MemoryTrace((derived,))], providers=[provider], claims=[claim]).find(claim)

    assert verdict.status is Status.INCONCLUSIVE
    assert verdict.reason == "a derived output is no evidence"


def test_a_derived_lse_is_left_out_of_the_control():
    derived = replace(PREFILL, lse=Output(PREFILL.lse.bits, Origin.DERIVED))

    verdict = replay([MemoryTrace((derived,))], providers=["trace"]).find("control")

    assert verdict.status is Status.BOUNDED
    assert verdict.compared.elements == PREFILL.out.bits.size


def test_a_cut_capture_is_inconclusive_and_says_where():
    ledger = (StepRecord(0, 2, 2, 2, 0), StepRecord(1, 2, 2, 1, 0, cut="budget of 1 GB reached"))
    cut = replace(TRACE, recording=Recording(ledger=ledger))

    report = replay([cut], providers=["tka1"], claims=["rows"])
    assert report.find("rows").status is Status.INCONCLUSIVE
    assert report.find("rows").reason.startswith("the capture is cut at step 1: budget of 1 GB reached")
    # The calls of step 0 are whole, whatever step 1 lost.
    assert replay([cut], providers=["tka1"], claims=["rows"], calls=[0]).find("rows").status is Status.HELD


@pytest.mark.parametrize(
    ("ledger", "words"),
    [
        ((), "the trace has no capture ledger"),
        ((StepRecord(0, 5, 5, 5, 0),), "step 0: its ledger says 5 calls recorded, the trace holds 1"),
        ((StepRecord(1, 0, 0, 0, 0),), "step 0: its ledger has no line for the step"),
        ((StepRecord(0, 1, 1, 1, 0), StepRecord(4, 2, 2, 2, 0)), "step 4: its ledger says 2 calls"),
    ],
)
def test_a_ledger_that_is_absent_or_disagrees_holds_nothing(ledger, words):
    trace = MemoryTrace((PREFILL,), Recording(ledger=ledger))

    verdict = replay([trace], providers=["tka1"], claims=["rows"]).find("rows")

    assert verdict.status is Status.INCONCLUSIVE
    assert words in verdict.reason


def test_a_recorded_kernel_that_nobody_has_is_not_run():
    alien = replace(PREFILL, provenance=Provenance("engine", "x", ExecutedIdentity("engine.kernel")))

    verdict = replay([MemoryTrace((alien,))]).find("recorded", "engine.kernel")

    assert verdict.status is Status.NOT_RUN
    assert verdict.reason == "no provider here runs the recorded kernel engine.kernel again"


def test_a_recorded_kernel_of_another_build_is_not_run():
    pytest.importorskip("torch")
    old = ExecutedIdentity("torch.flash_cpu", {"torch": "1.0"}, arch="x86_64", isa="avx2")
    trace = MemoryTrace((replace(PREFILL, provenance=Provenance("torch", "sdpa", old)),))

    verdict = replay([trace]).find("recorded", "torch-flash-cpu")

    assert verdict.status is Status.NOT_RUN
    assert "torch 1.0 recorded" in verdict.reason


def test_the_recorded_kernel_is_replayed_where_it_is_here():
    pytest.importorskip("torch")
    trace = MemoryTrace((record(dense_call(lengths=(20,), seed=8), create("torch-flash-cpu")),))

    report = replay([trace], claims=["recorded", "rerun"])

    assert report.find("recorded", "torch-flash-cpu").status is Status.OBSERVED_SAME  # never promised
    assert report.find("rerun", "torch-flash-cpu").status is Status.HELD
    assert report.find("recorded", "tka1").status is Status.NOT_APPLICABLE
    assert report.exit_code == Exit.OK


def test_recorded_is_not_run_without_the_launch_plan_that_the_kernel_needs():
    trace = MemoryTrace((record(PREFILL, create("oracle")),))

    report = replay([trace], providers=["tests.replayer.faulty:NeedsPlan"], claims=["recorded"])

    assert report.find("recorded").status is Status.NOT_RUN
    assert report.find("recorded").reason == "launch plan absent"
    assert report.exit_code == Exit.NOT_RUN


def test_only_recorded_gets_the_recorded_launch():
    """The variants are fresh launches, so the baseline is one too: this kernel rounds by its plan alone."""
    plan = LaunchPlan("engine", np.arange(PREFILL.num_rows), PREFILL.num_rows)
    call = record(replace(PREFILL, launch=plan), PlanDecides())

    report = replay(
        [MemoryTrace((call,))],
        providers=["tests.replayer.faulty:PlanDecides"],
        claims=["recorded", "rerun", "requests"],
    )

    assert [verdict.status for verdict in report.verdicts] == [Status.HELD] * 3


def _of_kernel(call, kernel):
    ran = replace(call.provenance.executed, kernel=kernel)
    return replace(call, provenance=replace(call.provenance, executed=ran))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["last", "first"])
def test_every_recorded_kernel_is_planned_wherever_its_calls_stand(order):
    """One that only the second call was computed by is not passed over in silence."""
    first, second = TRACE.calls[:2]
    calls = first, _of_kernel(second, "somebody")
    trace = MemoryTrace(tuple(calls[n] for n in order))

    report = replay([trace], claims=["recorded"])

    assert report.find("recorded", "tka1").status is Status.HELD
    assert report.find("recorded", "somebody").status is Status.NOT_RUN
    assert report.exit_code == Exit.NOT_RUN


@pytest.mark.parametrize("gone", ["no output", "derived"])
def test_a_named_claim_is_not_run_on_calls_without_evidence(gone):
    first, second = TRACE.calls[:2]
    without = {"no output": None, "derived": replace(second.out, origin=Origin.DERIVED)}[gone]
    trace = MemoryTrace((first, replace(second, out=without, lse=None)))

    report = replay([trace], claims=["recorded"], providers=["tka1"])

    assert report.find("recorded").status is Status.HELD
    assert "left out: " in report.find("recorded").reason
    assert report.find("recorded").left_out == 1
    assert report.exit_code == Exit.NOT_RUN
