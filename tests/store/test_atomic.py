"""A trace is there complete or not at all, and an old one stays until the new one is."""

import signal
import subprocess
import sys

import pytest

from tests.store.calls import decode_steps, prefill, recording
from tracekit.store import open_trace, verify_trace, write_trace
from tracekit.store.atomic import replacing


def _broken():
    yield prefill()
    raise RuntimeError("the engine died")


def test_an_error_in_the_middle_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="the engine died"):
        write_trace(tmp_path / "x.h5", recording(), _broken())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("point", ["first call", "before the rename"])
def test_an_error_leaves_the_old_trace(tmp_path, point):
    path = tmp_path / "x.h5"
    write_trace(path, recording(), [prefill()])
    before = path.read_bytes()
    seen = []

    def progress(calls, stored):
        seen.append(calls)
        if point == "first call" or len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(path, recording(), decode_steps(3), progress=progress)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


CHILD = """
import os, signal, sys
from tests.store.calls import decode_steps, recording
from tracekit.store import write_trace

path, reports = sys.argv[1], int(sys.argv[2])
seen = []

def progress(calls, stored):
    seen.append(calls)
    if len(seen) == reports:
        os.kill(os.getpid(), signal.SIGKILL)

write_trace(path, recording(), decode_steps(6), progress=progress)
"""


@pytest.mark.parametrize("reports", [1, 6, 7])
def test_a_killed_writer_leaves_the_old_trace(tmp_path, reports):
    """Killed after the first call, after the last one, and when the file is complete but not renamed."""
    path = tmp_path / "x.h5"
    write_trace(path, recording(), [prefill()])
    before = path.read_bytes()

    child = subprocess.run([sys.executable, "-c", CHILD, str(path), str(reports)], check=False)

    assert child.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    left = [item for item in tmp_path.iterdir() if item != path]
    assert len(left) <= 1
    assert all(item.name.startswith("x.h5.") and item.suffix == ".tmp" for item in left)
    write_trace(path, recording(), decode_steps(6))
    assert verify_trace(path) == []
    assert sorted(tmp_path.iterdir()) == sorted([path, *left])


def test_two_writers_of_one_target_do_not_meet(tmp_path):
    """One begins and ends while the other is between its first call and its end; both are whole in turn."""
    path = tmp_path / "x.h5"
    seen = []

    def meanwhile(calls, stored):
        if not seen:
            seen.append(calls)
            write_trace(path, recording(), decode_steps(3))
            assert verify_trace(path) == []

    write_trace(path, recording(), [prefill()], progress=meanwhile)
    assert verify_trace(path) == []
    with open_trace(path) as trace:
        assert len(trace) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_at_the_end_do_not_meet(tmp_path):
    path = tmp_path / "x.h5"
    with replacing(path) as first, replacing(path) as second:
        assert first != second
        assert {first.suffix, second.suffix} == {".tmp"}
        second.write_bytes(b"second")
        first.write_bytes(b"first")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_keeps_the_trace_that_it_opened(tmp_path):
    path = tmp_path / "x.h5"
    write_trace(path, recording(), [prefill()])
    with open_trace(path) as trace:
        write_trace(path, recording(), decode_steps(3))
        assert trace.call(0).num_rows == 8
    with open_trace(path) as trace:
        assert len(trace) == 3
