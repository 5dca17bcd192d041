"""Files that cannot be read or written: one sentence, exit 2, and nothing is run or replaced."""

import os
from pathlib import Path

import pytest

READERS = ("replay", "inspect", "diff")


def _told(tracekit_cli, *arguments):
    done = tracekit_cli(*arguments)
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    (line,) = done.err.strip().splitlines()
    return line


def _read(tracekit_cli, path):
    lines = [_told(tracekit_cli, verb, path, *([path] if verb == "diff" else [])) for verb in READERS]
    verify = tracekit_cli("verify", path)
    assert verify.code == 2
    assert verify.err == ""
    return *lines, verify.out


def test_a_folder_a_pipe_and_a_device_are_no_traces(tracekit_cli, tmp_path):
    os.mkfifo(tmp_path / "pipe.h5")
    for path, kind in ((tmp_path, "folder"), (tmp_path / "pipe.h5", "pipe"), ("/dev/null", "device")):
        for line in _read(tracekit_cli, path):
            assert f"{path} is a {kind}, not a trace" in line


@pytest.mark.parametrize("name", ["x" * 300, "/proc/self/mem"])
def test_a_file_that_the_system_does_not_give(tracekit_cli, tmp_path, name):
    for line in _read(tracekit_cli, tmp_path / name):
        assert "cannot be read" in line


def test_a_file_that_only_others_may_read(tracekit_cli, tmp_path, monkeypatch):
    path = tmp_path / "x.h5"
    path.write_bytes(b"")

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("tracekit.store.reader.Path.stat", refuse)
    done = tracekit_cli("inspect", path)
    monkeypatch.undo()
    assert done.code == 2
    assert "cannot be read: permission denied" in done.err


def _record(tracekit_cli, monkeypatch, path, *options):
    monkeypatch.setattr("tracekit.engines.driver.run_transformers", lambda **_: pytest.fail("it ran"))
    return _told(tracekit_cli, "record", "-o", path, "--model", "tiny-qwen3", "--prompt-ids", "5", *options)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 250, "/proc/x.h5"])
def test_no_model_runs_where_nothing_can_be_written(tracekit_cli, tmp_path, monkeypatch, name):
    assert "cannot be written" in _record(tracekit_cli, monkeypatch, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file(tracekit_cli, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tracekit.store.target.tempfile.TemporaryFile", refuse)
    assert "permission denied" in _record(tracekit_cli, monkeypatch, tmp_path / "x.h5")


@pytest.mark.parametrize("options", [(), ("--force",)])
def test_only_a_file_is_replaced(tracekit_cli, tmp_path, monkeypatch, options):
    os.mkfifo(tmp_path / "pipe.h5")
    for path, kind in ((tmp_path, "folder"), (tmp_path / "pipe.h5", "pipe"), (Path("/dev/null"), "device")):
        line = _record(tracekit_cli, monkeypatch, path, *options)
        assert f"{path} is a {kind}" in line
    assert Path("/dev/null").is_char_device()
