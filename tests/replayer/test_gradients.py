"""Claims about ranks and gradients through the whole replay, with kernels that answer too little."""

import pytest

from tests.replayer.faulty import WORDS_OF_GRADIENTS
from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call, sparse_call, with_d_out
from tracekit.verdict import Exit, Status

CLAIMS = ["splits", "cp", "tp", "grad", "backward"]
LONG = with_d_out(dense_call(lengths=(150, 20), new=(9, 3), sink=True, seed=1))
TRACE = MemoryTrace((LONG, with_d_out(sparse_call(lengths=(40,), seed=2))), name="training.h5")


def test_tka1_keeps_its_promises_about_ranks_and_gradients():
    report = replay([TRACE], providers=["tka1"], claims=CLAIMS)

    assert {v.claim: v.status for v in report.verdicts} == dict.fromkeys(CLAIMS, Status.HELD)
    assert {v.claim: v.control for v in report.verdicts} == {c: f"twin-{c} refuted" for c in CLAIMS}
    assert report.exit_code == Exit.OK


def test_a_place_in_a_gradient_is_named():
    report = replay([TRACE], providers=["tests.replayer.faulty:ArrivalOrder"], claims=["backward"])

    verdict = report.find("backward")
    assert verdict.status is Status.REFUTED
    assert verdict.first.tensor in ("d_k of dense", "d_v of dense")
    assert verdict.first.request in {str(key) for key in LONG.rows.requests}


@pytest.mark.parametrize(("kernel", "words"), WORDS_OF_GRADIENTS)
def test_a_kernel_that_lacks_a_gradient_is_never_held(kernel: str, words: str):
    verdict = replay([TRACE], providers=[f"tests.replayer.faulty:{kernel}"], claims=["backward"]).find(
        "backward"
    )
    assert verdict.status is Status.INCONCLUSIVE
    assert words in verdict.reason


def test_claims_that_say_nothing_say_why():
    short = MemoryTrace((dense_call(lengths=(6,), seed=1),))
    report = replay([short], providers=["tka1"], claims=["splits", "cp", "backward"])
    assert {v.status for v in report.verdicts} == {Status.NOT_APPLICABLE}
    assert "two leaves of 128 rows" in report.find("cp").reason
    assert report.find("backward").reason == "the trace holds no gradient of O"

    other = replay([TRACE], providers=["oracle"], claims=CLAIMS)
    reasons = {v.claim: v.reason for v in other.verdicts}
    assert {v.status for v in other.verdicts} == {Status.NOT_APPLICABLE}
    assert "the kernel gives no partials" in reasons["splits"]
    assert "the kernel gives no gradients" in reasons["backward"]
