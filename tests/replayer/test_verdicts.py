"""What a replay says, by status: each is reached by a real kernel on a call."""

from dataclasses import replace

import pytest

from tracekit.model import (
    DType,
    ExecutedIdentity,
    Origin,
    Output,
    Provenance,
    Recording,
    StepRecord,
)
from tracekit.providers.registry import create
from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call, record, sparse_call
from tracekit.verdict import Exit, Place, Status

TKA1 = create("tka1")
PREFILL = record(dense_call(lengths=(12, 7), seed=1), TKA1)
DECODE = record(dense_call(lengths=(12, 7, 9), new=(1, 1, 1), sink=True, layer=1, step=1, seed=2), TKA1)
SPARSE = record(sparse_call(lengths=(24, 13), seed=3), TKA1)
TRACE = MemoryTrace((PREFILL, DECODE, SPARSE), name="three.h5")


def statuses(report):
    return {(verdict.provider, verdict.claim): verdict.status for verdict in report.verdicts}


def test_without_names_the_trace_and_tka1_are_judged():
    report = replay([TRACE])

    held = ("recorded", "rerun", "threads", "requests", "rows", "solo", "subbatch", "chunks", "decode")
    assert statuses(report) == {
        ("trace", "control"): Status.BOUNDED,
        **{("tka1", claim): Status.HELD for claim in held},
        ("tka1", "control"): Status.BOUNDED,
    }
    assert report.exit_code == Exit.OK
    assert report.status is Status.BOUNDED
    assert report.find("solo").control == "twin-solo refuted"
    assert report.find("solo").executed == {"kernel": "tka1", "tka1": "1", "device": "cpu"}
    assert report.find("recorded").compared.elements == sum(
        call.out.bits.size + call.lse.bits.size for call in TRACE.calls
    )


def test_a_broken_promise_is_refuted_with_its_place():
    report = replay([TRACE], providers=["tests.replayer.faulty:spoiled"])

    verdict = report.find("solo")
    assert report.first is verdict
    assert verdict.status is Status.REFUTED
    assert report.exit_code == Exit.REFUTED
    assert isinstance(verdict.first, Place)
    assert (verdict.first.layer, verdict.first.position, verdict.first.head) == (0, 0, 0)
    assert verdict.first.request == str(PREFILL.rows.requests[0])
    assert verdict.first.actual == 0.0  # the only key of the first row is dropped
    assert verdict.first.expected_bits == f"{PREFILL.out.bits.data[0, 0, 0]:#06x}"
    assert verdict.variant == "row alone"
    assert verdict.differences.elements > 0
    assert verdict.next_command == (
        "tracekit replay three.h5 --provider tests.replayer.faulty:spoiled --claim solo --calls 0 --seed 0"
    )
    assert report.find("rerun").status is Status.HELD


def test_claims_that_were_never_made_are_probed_and_not_judged():
    report = replay([TRACE], providers=["tests.replayer.faulty:spoiled"], probe=True, claims=None)

    assert report.find("requests").status is Status.OBSERVED_SAME
    assert report.find("decode").status is Status.OBSERVED_VARIES
    assert "recorded" not in {verdict.claim for verdict in report.verdicts}


def test_a_named_claim_is_judged_even_where_it_was_not_promised():
    report = replay([TRACE], providers=["tests.replayer.faulty:spoiled"], claims=["decode"])
    assert statuses(report) == {("tests.replayer.faulty:spoiled", "decode"): Status.REFUTED}


def test_one_row_leaves_nothing_to_permute():
    one = MemoryTrace((record(dense_call(lengths=(5,), new=(1,)), TKA1),))

    report = replay([one], providers=["tka1"], claims=["rows", "solo", "requests", "chunks", "decode"])

    assert {verdict.status for verdict in report.verdicts} == {Status.NOT_APPLICABLE}
    assert report.find("rows").reason == "the call has one row"
    assert report.find("decode").reason == "the call is a one-token decode itself"
    assert report.exit_code == Exit.NOTHING


def test_what_a_kernel_refuses_is_not_run():
    floats = MemoryTrace((dense_call(lengths=(5,), dtype=DType.FLOAT32),))

    named = replay([floats], providers=["tka1"], claims=["rows"])
    assert named.find("rows").status is Status.NOT_RUN
    assert named.find("rows").reason == "it does not take dtype float32"
    assert named.exit_code == Exit.NOT_RUN


def test_calls_that_a_kernel_refuses_are_said_to_be_left_out():
    mixed = MemoryTrace((PREFILL, dense_call(lengths=(5,), dtype=DType.FLOAT32)))

    report = replay([mixed], providers=["tka1"], claims=["rows"])
    verdict = report.find("rows")

    assert verdict.status is Status.HELD
    assert (verdict.calls, verdict.left_out) == (1, 1)
    assert (report.exit_code, report.status) == (Exit.NOT_RUN, Status.NOT_RUN)
    assert replay([mixed], providers=["tka1"], calls=[0], claims=["rows"]).exit_code == Exit.OK
    assert replay([mixed], providers=["tka1"]).exit_code == Exit.OK
    assert verdict.reason.endswith("left out: it does not take dtype float32")


def test_recorded_needs_the_identity_that_was_recorded():
    other = Provenance("in memory", "tka1", ExecutedIdentity("tka1", {"tka1": "2"}))
    drifted = MemoryTrace((replace(PREFILL, provenance=other),))

    verdict = replay([drifted], providers=["tka1"], claims=["recorded"]).find("recorded")

    assert verdict.status is Status.NOT_RUN
    assert verdict.reason == "another build answered: tka1 2 recorded, 1 here"


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


def test_an_engine_outside_its_envelope_is_refuted_with_the_convention_it_follows():
    lse = PREFILL.lse.bits.to_float32() / 0.6931472
    two = replace(PREFILL, lse=Output(PREFILL.lse.bits.from_float32(lse, DType.FLOAT32), Origin.EXECUTED))

    verdict = replay([MemoryTrace((two,))], providers=["trace"]).find("control")

    assert verdict.status is Status.REFUTED
    assert "the LSE fits base 2 (×1/ln 2)" in verdict.reason
    assert verdict.first is not None
    assert verdict.first.tensor == "lse"


def test_the_trace_runs_nothing():
    report = replay([TRACE], providers=["trace"], claims=["rows"])
    assert report.find("rows").status is Status.NOT_RUN
    assert report.exit_code == Exit.NOT_RUN


def test_a_cut_capture_is_inconclusive_and_says_where():
    ledger = (StepRecord(0, 2, 2, 2, 0), StepRecord(1, 2, 2, 1, 0, cut="budget of 1 GB reached"))
    cut = replace(TRACE, recording=Recording(ledger=ledger))

    report = replay([cut], providers=["tka1"], claims=["rows"])
    assert report.find("rows").status is Status.INCONCLUSIVE
    assert report.find("rows").reason.startswith("the capture is cut at step 1: budget of 1 GB reached")
    # The calls of step 0 are whole, whatever step 1 lost.
    assert replay([cut], providers=["tka1"], claims=["rows"], calls=[0]).find("rows").status is Status.HELD


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


def test_a_named_claim_is_only_probed_on_a_kernel_that_nobody_named():
    pytest.importorskip("torch")
    trace = MemoryTrace((record(dense_call(lengths=(40,), seed=8), create("torch-flash-cpu")),))

    report = replay([trace], claims=["decode"])

    assert report.find("decode", "tka1").status is Status.HELD
    assert report.find("decode", "torch-flash-cpu").status is Status.OBSERVED_VARIES
    assert report.exit_code == Exit.OK


def test_recorded_is_not_run_without_the_launch_plan_that_the_kernel_needs():
    trace = MemoryTrace((record(PREFILL, create("oracle")),))

    report = replay([trace], providers=["tests.replayer.faulty:NeedsPlan"], claims=["recorded"])

    assert report.find("recorded").status is Status.NOT_RUN
    assert report.find("recorded").reason == "launch plan absent"
    assert report.exit_code == Exit.NOT_RUN


def test_progress_is_told_call_by_call():
    seen = []
    replay([TRACE], providers=["tka1"], claims=["rerun"], progress=lambda *step: seen.append(step))
    assert seen == [
        (0, 3, "three.h5 call 0"),
        (1, 3, "three.h5 call 1"),
        (2, 3, "three.h5 call 2"),
        (3, 3, "done"),
    ]


def test_a_report_is_plain_json():
    import json

    report = replay([TRACE], providers=["tka1"], claims=["rerun"], seed=5)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["status"] == "held"
    assert data["exit_code"] == 0
    assert data["verdicts"][0]["seed"] == 5
