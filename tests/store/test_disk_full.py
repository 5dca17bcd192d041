"""A disk that takes no more is one sentence: no crash, nothing left behind, the old trace untouched."""

import os
import subprocess
import sys

import pytest

from tests.store.calls import decode_steps, prefill, recording
from tracekit.errors import TraceUnwritable
from tracekit.store import verify_trace, write_trace

CHILD = """
import resource, signal, sys
from tests.store.calls import decode_steps, recording
from tracekit.errors import TraceUnwritable
from tracekit.store import write_trace

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    write_trace(sys.argv[1], recording(), decode_steps(6))
except TraceUnwritable as error:
    print(error.rule, error)
"""


def _limited(path, limit):
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(limit)], check=False, capture_output=True, text=True
    )


@pytest.mark.parametrize("limit", [0, 512, 2000, 8192])
@pytest.mark.parametrize("exists", [True, False])
def test_a_file_that_may_not_grow(tmp_path, limit, exists):
    path = tmp_path / "x.h5"
    if exists:
        write_trace(path, recording(), [prefill()])
    before = {item: item.read_bytes() for item in tmp_path.iterdir()}

    done = _limited(path, limit)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"F-WRITE {path} cannot be written: file too large; ")
    assert {item: item.read_bytes() for item in tmp_path.iterdir()} == before


def test_a_disk_that_is_full_from_some_byte_on(tmp_path, monkeypatch):
    path = tmp_path / "x.h5"
    write_trace(path, recording(), decode_steps(6))
    whole = path.stat().st_size
    write = os.write
    for room in (0, 600, whole // 2, whole - 1):
        left = [room]

        def full(descriptor, data, left=left):
            if not left[0]:
                raise OSError(28, "No space left on device")
            done = write(descriptor, data[: left[0]])
            left[0] -= done
            return done

        monkeypatch.setattr("tracekit.store.head_sink.os.write", full)
        with pytest.raises(TraceUnwritable, match="no space left on device"):
            write_trace(path, recording(), [prefill(), *decode_steps(6)])
        monkeypatch.undo()
        assert list(tmp_path.iterdir()) == [path]
        assert verify_trace(path) == []
        assert path.stat().st_size == whole


def test_an_error_of_the_caller_stays_what_it_is(tmp_path):
    def calls():
        yield prefill()
        raise FileNotFoundError(2, "No such file or directory", "prompts.txt")

    with pytest.raises(FileNotFoundError, match=r"prompts\.txt"):
        write_trace(tmp_path / "x.h5", recording(), calls())
