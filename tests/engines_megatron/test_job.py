"""`tracekit record -- CMD` around a program that trains a model of Megatron-core."""

import os
import subprocess
import sys
from pathlib import Path

import tracekit

ROOT = Path(__file__).parents[2]


def test_a_training_program_is_recorded_with_its_gradients(tmp_path):
    out = tmp_path / "run.h5"
    command = [sys.executable, "-c", "from tracekit.cli import main; main()", "record", "-o", str(out)]
    ran = subprocess.run(
        [*command, "--engine", "megatron", "--", sys.executable, "-m", "tests.engines_megatron.job"],
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert list(tmp_path.iterdir()) == [out]
    assert tracekit.verify(out) == []
    with tracekit.open(out) as trace:
        assert all(head.has_gradients for head in trace.heads)
        assert {head.layer for head in trace.heads} == {0, 1}
        assert all(line.complete for line in trace.recording.ledger)
