"""A recording never takes the place of a file by accident, least of all half a recording."""

import numpy as np
import pytest

from tracekit.errors import TraceUnwritable, UsageError
from tracekit.recorder.api import record
from tracekit.store import open_trace, verify_trace


def _step(session, token=5):
    rng = np.random.default_rng(token)
    kv = rng.standard_normal((1, 1, 8), np.float32)
    with session.step({"a": [token]}):
        session.attention(layer=0, q=kv, scale=1.0, keys=kv, values=kv, out=kv)


def _broken(path, error, **options):
    with record(path, **options) as session:
        _step(session, 6)
        raise error


def test_a_file_that_exists_is_refused_on_entry(tmp_path):
    path = tmp_path / "x.h5"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists") as told, record(path):
        pytest.fail("the block was entered")
    assert told.value.rule == "U-EXISTS"
    assert path.read_text() == "mine"


def test_force_replaces_a_whole_recording_only(tmp_path):
    path = tmp_path / "x.h5"
    with record(path) as session:
        _step(session)
    before = path.read_bytes()
    with pytest.raises(KeyError) as told:
        _broken(path, KeyError("no"), force=True)
    assert "stays as it was" in told.value.__notes__[0]
    assert path.read_bytes() == before
    with record(path, force=True) as session:
        _step(session, 6)
    assert path.read_bytes() != before


def test_a_file_that_came_meanwhile_stays_and_nothing_is_lost(tmp_path):
    """Two recordings of one program by one name: the second would have taken the place of the first."""
    path, beside = tmp_path / "x.h5", tmp_path / "x-2.h5"
    with record(path) as inner:
        _step(inner, 6)
    before = path.read_bytes()
    path.rename(tmp_path / "written")
    outer = record(path)
    _step(outer.__enter__())
    (tmp_path / "written").rename(path)
    with pytest.raises(UsageError, match=f"this recording is {beside}"):
        outer.__exit__(None, None, None)
    assert path.read_bytes() == before
    assert verify_trace(beside) == verify_trace(path) == []


def test_half_a_recording_says_so(tmp_path):
    path = tmp_path / "x.h5"
    with pytest.raises(ValueError, match="no"):
        _broken(path, ValueError("no \udcff"))
    assert verify_trace(path) == []
    with open_trace(path) as trace:
        assert trace.recording.notes["recording"] == "ended by ValueError: no \\udcff"
        assert "ended by ValueError" in trace.recording.ledger[-1].cut


def test_a_device_is_refused(tmp_path):
    with pytest.raises(TraceUnwritable), record("/dev/null", force=True):
        pytest.fail("the block was entered")
