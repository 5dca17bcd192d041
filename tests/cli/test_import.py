"""`import tracekit` costs nothing and brings nothing."""

import subprocess
import sys


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(' '.join(sys.modules))"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_import_brings_neither_torch_nor_numpy():
    assert not modules_after("import tracekit") & {"torch", "numpy", "h5py", "rich"}


def test_reading_and_replaying_bring_no_torch():
    assert "torch" not in modules_after("import tracekit.api")


def test_help_brings_no_engine():
    assert not modules_after("from tracekit.cli.main import run; run(['--help'])") & {"torch", "h5py"}
