"""What a replay says, by status: each is reached by a real kernel on a call."""

from dataclasses import replace

import pytest

from tests.replayer.three import PREFILL, TKA1, TRACE
from tracekit.model import (
    Bits,
    DType,
    Origin,
    Output,
)
from tracekit.providers.registry import create
from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call, record
from tracekit.verdict import Exit, Place, Status


def statuses(report):
    return {(verdict.provider, verdict.claim): verdict.status for verdict in report.verdicts}


def test_without_names_the_trace_and_tka1_are_judged():
    report = replay([TRACE])

    held = ("recorded", "rerun", "threads", "requests", "rows", "solo", "subbatch", "chunks", "decode")
    held += ("page-ids", "page-size", "layout", "padding", "slack", "after", "schedule", "host-graph")
    held += ("splits", "cp", "tp", "grad")
    assert statuses(report) == {
        ("trace", "control"): Status.BOUNDED,
        **{("tka1", claim): Status.HELD for claim in held},
        ("tka1", "control"): Status.BOUNDED,
        ("tka1", "backward"): Status.NOT_APPLICABLE,
    }
    assert report.exit_code == Exit.OK
    assert report.status is Status.BOUNDED
    assert report.find("solo").control == "twin-solo refuted"
    assert report.find("solo").executed == {"kernel": "tka1", "tka1": "1"}
    assert report.find("recorded").compared.elements == sum(
        call.out.bits.size + call.lse.bits.size for call in TRACE.calls
    )


def test_claims_about_pages_say_who_read_the_pages():
    """`tka1` reads rows: what it keeps about pages is kept together with the canonicaliser."""
    report = replay([TRACE], providers=["tka1"], claims=["page-ids", "page-size", "layout", "padding"])
    for verdict in report.verdicts:
        assert verdict.status is Status.HELD
        told = "of canonicaliser and kernel together" in verdict.reason
        assert told == (verdict.claim != "padding")


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


def test_an_lse_that_disappears_in_a_variant_is_missed():
    report = replay([TRACE], providers=["tests.replayer.faulty:LosesLse"], claims=["solo", "requests"])

    assert report.find("solo").status is Status.INCONCLUSIVE
    assert report.find("solo").reason == "the lse is missing in variant `row alone` of call 0"
    assert report.find("requests").status is Status.HELD


def test_one_row_leaves_nothing_to_permute():
    one = MemoryTrace((record(dense_call(lengths=(5,), new=(1,)), TKA1),))

    report = replay([one], providers=["tka1"], claims=["rows", "solo", "requests", "chunks", "decode"])

    assert {verdict.status for verdict in report.verdicts} == {Status.NOT_APPLICABLE}
    assert report.find("rows").reason == "the call has one row"
    assert report.find("decode").reason == "the call is a one-token decode itself"
    assert report.exit_code == Exit.NOTHING


NARROW = "tests.replayer.faulty:Narrow"
"""TKA-1 that takes bf16 only."""


def test_what_a_kernel_refuses_is_not_run():
    floats = MemoryTrace((dense_call(lengths=(5,), dtype=DType.FLOAT32),))

    named = replay([floats], providers=[NARROW], claims=["rows"])
    assert named.find("rows").status is Status.NOT_RUN
    assert named.find("rows").reason == "it does not take dtype float32"
    assert named.exit_code == Exit.NOT_RUN


def test_calls_that_a_kernel_refuses_are_said_to_be_left_out():
    mixed = MemoryTrace((PREFILL, dense_call(lengths=(5,), dtype=DType.FLOAT32)))

    report = replay([mixed], providers=[NARROW], claims=["rows"])
    verdict = report.find("rows")

    assert verdict.status is Status.HELD
    assert (verdict.calls, verdict.left_out) == (1, 1)
    assert (report.exit_code, report.status) == (Exit.NOT_RUN, Status.NOT_RUN)
    assert replay([mixed], providers=[NARROW], calls=[0], claims=["rows"]).exit_code == Exit.OK
    assert replay([mixed], providers=[NARROW]).exit_code == Exit.OK
    assert verdict.reason.endswith("left out: it does not take dtype float32")


def test_an_engine_outside_its_envelope_is_refuted_with_the_convention_it_follows():
    lse = PREFILL.lse.bits.to_float32() / 0.6931472
    two = replace(PREFILL, lse=Output(PREFILL.lse.bits.from_float32(lse, DType.FLOAT32), Origin.EXECUTED))

    verdict = replay([MemoryTrace((two,))], providers=["trace"]).find("control")

    assert verdict.status is Status.REFUTED
    assert "the LSE fits base 2 (×1/ln 2)" in verdict.reason
    assert verdict.first is not None
    assert verdict.first.tensor == "lse"


@pytest.mark.parametrize(("wild", "status"), [(2, Status.BOUNDED), (3, Status.INCONCLUSIVE)])
def test_a_bound_that_says_nothing_of_most_rows_says_nothing(wild, status):
    call = dense_call(lengths=(5,), seed=1)
    data = call.q.data.copy()
    data[:wild, 0, 0] = 0x7F80  # infinite
    trace = MemoryTrace((record(replace(call, q=Bits(data, call.dtype)), TKA1),))

    verdict = replay([trace], providers=["tka1"], claims=["control"]).find("control")

    assert verdict.status is status
    assert f"no usable bound for {wild} of 5 rows" in verdict.reason


def test_the_trace_runs_nothing():
    report = replay([TRACE], providers=["trace"], claims=["rows"])
    assert report.find("rows").status is Status.NOT_RUN
    assert report.exit_code == Exit.NOT_RUN


def test_a_named_claim_is_only_probed_on_a_kernel_that_nobody_named():
    pytest.importorskip("torch")
    trace = MemoryTrace((record(dense_call(lengths=(40,), seed=8), create("torch-flash-cpu")),))

    report = replay([trace], claims=["decode"])

    assert report.find("decode", "tka1").status is Status.HELD
    assert report.find("decode", "torch-flash-cpu").status is Status.OBSERVED_VARIES
    assert report.exit_code == Exit.OK


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
