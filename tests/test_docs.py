"""The provider of docs/providers.md, as it is printed there."""

import json
import re
import sys
from pathlib import Path

import pytest

from tracekit.cli.main import run

ROOT = Path(__file__).parents[1]
KERNEL, SUITE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "providers.md").read_text(), re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_kernel.py").write_text(KERNEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_kernel", None)


@pytest.mark.parametrize(("golden", "code"), [("qwen3-batch.sdpa.h5", 0), ("gpt-oss.eager.h5", 4)])
def test_it_replays_and_refuses_a_sink(folder, capsys, golden, code):
    trace = ROOT / "traces" / golden
    assert run(["replay", str(trace), "--provider", "my_kernel:Naive", "--claim", "rerun", "--json"]) == code
    (verdict,) = json.loads(capsys.readouterr().out)["verdicts"]
    assert verdict["status"] == ("held" if code == 0 else "not run")


def test_it_keeps_what_it_advertises(folder, capsys):
    trace = ROOT / "traces" / "qwen3-batch.sdpa.h5"
    assert run(["replay", str(trace), "--provider", "my_kernel:Naive", "--json"]) == 0
    told = {v["claim"]: v["status"] for v in json.loads(capsys.readouterr().out)["verdicts"]}
    assert told == {"rerun": "held", "control": "bounded"}


def test_it_passes_the_suite(folder):
    import subprocess

    (folder / "test_naive.py").write_text("from my_kernel import Naive\n" + SUITE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        "test_naive.py",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
