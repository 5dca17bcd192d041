"""SIGTERM in a process that records several models by several engines."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tracekit.store import open_trace

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal
from dataclasses import replace
import numpy as np
from tracekit.engines.process import Recordings
from tracekit.engines.terminated import forget
from tracekit.env import settings

KV = np.ones((3, 1, 8), np.float32)

def join(session, _):
    with session.step({"a": [5, 6, 7]}, calls=1):
        q = np.ones((3, 2, 8), np.float32)
        session.attention(layer=0, q=q, keys={"a": KV}, values={"a": KV}, scale=0.5)

"""
TWO = """
here = settings()
there = replace(here, record=here.record.parent / "other" / "run.h5")
assert Recordings(here).begin(join, None)
assert Recordings(there).begin(join, None)
os.kill(os.getpid(), signal.SIGTERM)
"""
OWN = """
def mine(*_):
    os._exit(7)
signal.signal(signal.SIGTERM, mine)
Recordings(settings()).begin(join, None)
assert signal.getsignal(signal.SIGTERM) is mine
os.kill(os.getpid(), signal.SIGTERM)
"""
RESTORED = """
from tracekit.engines import terminated
saved = []
terminated.save_when_terminated(1, lambda: saved.append(1))
terminated.save_when_terminated(2, lambda: saved.append(2))
forget(1)
assert signal.getsignal(signal.SIGTERM) is terminated._ended
forget(2)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert not saved
os.kill(os.getpid(), signal.SIGTERM)
"""


def run(tmp_path, code):
    environ = {**os.environ, "TRACEKIT_RECORD": str(tmp_path / "run.h5")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + code], cwd=ROOT, env=environ, check=False
    ).returncode


def test_all_recorders_of_a_process_write_what_they_have(tmp_path):
    (tmp_path / "other").mkdir()
    assert run(tmp_path, TWO) == -signal.SIGTERM

    written = sorted(tmp_path.rglob("*.h5"))
    assert len(written) == 2
    for path in written:
        with open_trace(path) as trace:
            assert trace.recording.notes["recording"] == "ended by SIGTERM"
            assert len(trace.heads) == 1
    assert not list(tmp_path.rglob("*.started"))


@pytest.mark.parametrize(("code", "status"), [(OWN, 7), (RESTORED, -signal.SIGTERM)], ids=["own", "restored"])
def test_a_handler_of_the_program_stays_and_ours_goes(tmp_path, code, status):
    assert run(tmp_path, code) == status
