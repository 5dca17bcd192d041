"""The core in a bare environment: the wheel, no torch, every verb that must work there.

`make test` builds the environment `.venv-core`; nothing is installed here.
"""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / ".venv-core" / "bin"
GOLDEN = "traces/smollm2-prefill.tka1.h5"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    if not (CORE / "python").exists():
        pytest.fail("the bare environment is missing; run `make test`, which builds it")
    return subprocess.run([str(CORE / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True)


def test_torch_is_really_absent():
    assert run("python", "-c", "import torch").returncode == 1


def test_the_wheel_is_what_is_imported():
    where = run("python", "-P", "-c", "import tracekit; print(tracekit.__file__)").stdout
    assert ".venv-core" in where


@pytest.mark.parametrize("verb", [["inspect"], ["verify"], ["diff", GOLDEN]], ids=lambda verb: verb[0])
def test_verbs_that_read(verb):
    done = run("tracekit", *verb, GOLDEN)
    assert (done.returncode, done.stderr) == (0, "")


def test_replay_on_the_compiled_kernel():
    done = run("tracekit", "replay", GOLDEN, "--claim", "recorded,rows", "--json")
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)["verdicts"]
    assert {(v["claim"], v["status"]) for v in verdicts if v["provider"] == "tka1"} == {
        ("recorded", "held"),
        ("rows", "held"),
    }


def test_a_provider_that_needs_torch_is_not_run_and_says_so():
    done = run("tracekit", "replay", GOLDEN, "--provider", "torch-flash-cpu", "--claim", "rerun")
    assert done.returncode == 4
    assert "torch" in done.stdout
