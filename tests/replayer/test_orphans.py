"""No process outlives the replay that started it."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call
from tracekit.verdict import Status

TRACE = MemoryTrace((dense_call(lengths=(6, 4), seed=1),))
ROOT = Path(__file__).parents[2]
REPLAY = """
from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call

trace = MemoryTrace((dense_call(lengths=(6, 4), seed=1),))
replay([trace], providers=["tests.replayer.faulty:{kernel}"], claims=["solo"], timeout=600)
"""


@pytest.fixture
def pipe(tmp_path, monkeypatch):
    """The reading end of a named pipe that hanging kernels keep open."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    monkeypatch.setenv("PIPE_OF_THE_TEST", str(path))
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield end
    os.close(end)


def read(end: int) -> bytes:
    """What comes next; empty when the last writer is gone."""
    readable, _, _ = select.select([end], [], [], 60)
    assert readable, "a process is still there"
    return os.read(end, 100)


def test_what_a_hanging_kernel_started_ends_with_it(pipe):
    report = replay([TRACE], providers=["tests.replayer.faulty:HangsInTheOpen"], claims=["solo"], timeout=2.0)

    assert report.find("solo").status is Status.INCONCLUSIVE
    assert read(pipe) == b"hangs"
    assert read(pipe) == b""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_kernel_ends_with_a_replay_that_is_ended(pipe, how):
    code = REPLAY.format(kernel="HangsAlone")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as parent:
        try:
            assert read(pipe) == b"hangs"
        finally:
            parent.send_signal(how)
    assert parent.returncode == -how
    assert read(pipe) == b""
