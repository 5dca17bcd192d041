"""Traces side by side: the same report, and no child that outlives it."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tracekit.errors import TraceCorrupt, UsageError
from tracekit.replayer import plan, replay
from tracekit.testing import MemoryTrace, dense_call
from tracekit.verdict import Status

ROOT = Path(__file__).parents[2]
CALLS = [dense_call(lengths=(6, 4), seed=seed) for seed in range(5)]
TRACES = [MemoryTrace((call,), name=f"{number}.h5") for number, call in enumerate(CALLS)]
HANGING = """
from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call

traces = [MemoryTrace((dense_call(lengths=(6, 4), seed=n),), name=str(n)) for n in range(3)]
replay(traces, providers=["tests.replayer.faulty:HangsAlone"], claims=["solo"], timeout=600, jobs=2)
"""
SPOILED = "tests.replayer.faulty:spoiled"


class Damaged(MemoryTrace):
    def call(self, index):
        raise TraceCorrupt(f"call {index} is damaged.", rule="E-19")


def test_the_report_is_the_same_for_any_number_of_jobs():
    traces = [*TRACES[:2], Damaged((CALLS[2],), name="bad.h5"), *TRACES[3:]]
    reports = [
        replay(traces, providers=["oracle", SPOILED], claims=["solo", "rerun"], jobs=jobs).to_dict()
        for jobs in (1, 2, 5)
    ]

    assert reports[0] == reports[1] == reports[2]
    names = [verdict["trace"] for verdict in reports[0]["verdicts"]]
    assert names == sorted(names)
    assert {verdict["status"] for verdict in reports[0]["verdicts"]} == {"held", "refuted"}
    assert [error["trace"] for error in reports[0]["errors"]] == ["bad.h5"]


def test_where_nothing_was_found_the_first_error_is_raised():
    with pytest.raises(TraceCorrupt, match="call 0 is damaged"):
        replay([Damaged((CALLS[0],), name=name) for name in "ab"], providers=["oracle"], jobs=2)


def test_a_kernel_that_dies_takes_nothing_with_it():
    report = replay(
        TRACES[:2], providers=["tests.replayer.faulty:Crashes", "oracle"], claims=["rerun"], jobs=2
    )

    assert [(verdict.provider[-7:], verdict.status) for verdict in report.verdicts] == [
        ("Crashes", Status.INCONCLUSIVE),
        ("oracle", Status.HELD),
    ] * 2


def test_progress_counts_every_call_once():
    told = []
    replay(TRACES, providers=["oracle"], claims=["rerun"], jobs=3, progress=lambda *step: told.append(step))

    assert told[-1] == (5, 5, "done")
    assert {text for _, _, text in told[:-1]} == {f"{number}.h5 call 0" for number in range(5)}
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_jobs(jobs):
    with pytest.raises(UsageError, match="give 1 or more"):
        replay(TRACES, jobs=jobs)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_kernel_that_is_not_there_is_told_of_each_trace_alike(monkeypatch, jobs):
    """The same sentence for the second trace, whose desk has met the kernel before."""
    monkeypatch.setattr(plan, "PORTABLE", "tests.replayer.faulty:NotInstalled")
    report = replay(TRACES, claims=["rows"], jobs=jobs)

    mine = [verdict for verdict in report.verdicts if verdict.provider.endswith("NotInstalled")]
    assert [(verdict.trace, verdict.status) for verdict in mine] == [
        (f"{number}.h5", Status.NOT_RUN) for number in range(5)
    ]
    assert {verdict.reason for verdict in mine} == {"this kernel needs a GPU."}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_kernels_end_with_a_replay_that_is_ended(tmp_path, how):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    environ = {**os.environ, "PIPE_OF_THE_TEST": str(path)}
    said = b""
    with subprocess.Popen(
        [sys.executable, "-c", HANGING], cwd=ROOT, env=environ, stderr=subprocess.DEVNULL
    ) as parent:
        try:
            while len(said) < len(b"hangs" * 2):
                said += read(end)
        finally:
            parent.send_signal(how)
    assert parent.returncode == -how
    assert read(end) == b""
    os.close(end)


def read(end: int) -> bytes:
    """What comes next; empty when the last writer is gone."""
    readable, _, _ = select.select([end], [], [], 60)
    assert readable, "a process is still there"
    return os.read(end, 100)
