"""Kernels that raise, die or hang: a verdict, never a traceback, and the next claim gets a fresh process."""

import os

import pytest

from tracekit.errors import ProviderFailed, Unavailable, UsageError
from tracekit.replayer import plan, replay
from tracekit.replayer.messages import Named
from tracekit.replayer.worker import Worker
from tracekit.testing import MemoryTrace, dense_call
from tracekit.verdict import Exit, Status

TRACE = MemoryTrace((dense_call(lengths=(6, 4), seed=1),), name="two-requests.h5")


def run(kernel: str, timeout: float = 60.0, claims=None):
    return replay([TRACE], providers=[f"tests.replayer.faulty:{kernel}"], claims=claims, timeout=timeout)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("Raises", "the kernel raised IndexError: list index out of range."),
        ("Leaves", "the kernel raised SystemExit: 0."),
        ("Exits", "the process of the kernel ended with status 7 (on a variant of the call)."),
        ("Crashes", "the process of the kernel was ended by signal 11 (SIGSEGV) (on a variant of the call)."),
        ("OneAnswerShort", "the kernel gave 9 answers to 10 calls"),
        ("OneRowShort", "where bfloat16 [1, 4, 16] was asked for"),
    ],
)
def test_a_kernel_that_fails_in_one_claim_leaves_the_others_standing(kernel, words):
    report = run(kernel, claims=["solo", "rows", "decode"])

    assert report.find("solo").status is Status.INCONCLUSIVE
    assert words in report.find("solo").reason
    assert report.find("solo").reason.startswith("call 0: ")
    assert report.find("rows").status is Status.HELD
    assert report.find("decode").status is Status.INCONCLUSIVE
    assert report.exit_code == Exit.INCONCLUSIVE


def test_a_kernel_that_hangs_is_ended():
    report = run("Hangs", timeout=2.0, claims=["solo", "rows"])

    assert report.find("solo").status is Status.INCONCLUSIVE
    assert "did not answer within 2 seconds" in report.find("solo").reason
    assert report.find("rows").status is Status.HELD


def test_a_kernel_that_dies_on_the_baseline_fails_every_claim():
    report = run("FailsOnBaseline")

    assert {verdict.status for verdict in report.verdicts} == {Status.INCONCLUSIVE}
    assert all("on the call as it stands" in verdict.reason for verdict in report.verdicts)


def test_a_probe_that_fails_does_not_change_the_exit_code():
    report = replay([TRACE], providers=["tests.replayer.faulty:Exits"], probe=True)

    assert report.find("decode").status is Status.NOT_RUN
    assert "ended with status 7" in report.find("decode").reason
    assert report.find("threads").status is Status.OBSERVED_SAME


def test_what_a_kernel_prints_disturbs_nothing(capfd):
    assert run("Talks", claims=["solo"]).status is Status.HELD
    assert capfd.readouterr() == ("", "")


def test_a_kernel_that_cannot_be_made_is_an_error_where_it_was_named():
    with pytest.raises(ProviderFailed, match="raised OSError: libkernel"):
        run("CannotBeMade")
    with pytest.raises(Unavailable, match="needs a GPU"):
        run("NotInstalled")
    with pytest.raises(UsageError, match="is no provider"):
        run("no_provider")
    with pytest.raises(UsageError, match="cannot be imported"):
        run("NoSuchThing")


def test_with_a_claim_by_name_it_is_a_verdict():
    missing = run("NotInstalled", claims=["rows"])
    assert missing.find("rows").status is Status.NOT_RUN
    assert missing.find("rows").reason == "this kernel needs a GPU."
    assert missing.exit_code == Exit.NOT_RUN
    broken = run("CannotBeMade", claims=["rows"])
    assert broken.find("rows").status is Status.INCONCLUSIVE
    assert broken.exit_code == Exit.INCONCLUSIVE


@pytest.mark.parametrize(
    ("kernel", "status", "code"),
    [
        ("CannotBeMade", Status.INCONCLUSIVE, Exit.INCONCLUSIVE),
        ("NotInstalled", Status.NOT_RUN, Exit.NOT_RUN),
    ],
)
def test_a_named_claim_never_vanishes_with_its_kernel(monkeypatch, kernel, status, code):
    name = f"tests.replayer.faulty:{kernel}"
    monkeypatch.setattr(plan, "PORTABLE", name)

    report = replay([TRACE, TRACE], claims=["rows", "solo"])

    mine = [verdict for verdict in report.verdicts if verdict.provider == name]
    assert [(verdict.claim, verdict.status) for verdict in mine] == [("rows", status), ("solo", status)] * 2
    assert report.exit_code == code


def test_a_kernel_that_cannot_start_is_not_passed_over_without_names(monkeypatch):
    monkeypatch.setattr(plan, "PORTABLE", "tests.replayer.faulty:CannotBeMade")

    assert replay([TRACE]).exit_code == Exit.INCONCLUSIVE


def test_the_error_of_a_dead_child_carries_its_last_words():
    with Worker(Named("tests.replayer.faulty:Crashes"), 60) as worker:
        worker.open()
        with pytest.raises(ProviderFailed) as failure:
            worker.baseline(dense_call(lengths=(1,)), 0)
    assert failure.value.rule == "P-DIED"
    assert failure.value.fields["status"] == -11
    assert "Segmentation fault" in failure.value.fields["stderr"]


def test_a_child_ends_with_its_worker():
    with Worker(Named("oracle"), 60) as worker:
        worker.open()
        pid = worker.pid
        assert pid is not None
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_starts_again_after_a_failure():
    call = dense_call(lengths=(1,))
    with Worker(Named("tests.replayer.faulty:Exits"), 60) as worker:
        worker.open()
        first = worker.pid
        with pytest.raises(ProviderFailed):
            worker.baseline(call, 0)
        assert worker.pid is None
        assert worker.refuses(call) is None
        assert worker.pid not in (None, first)
