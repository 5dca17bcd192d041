"""Files of the working folder are data: none is executed unless the user names it as a kernel."""

import pytest

from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call
from tracekit.verdict import Status

TRACE = MemoryTrace((dense_call(lengths=(6, 4), seed=1),))
SPY = (
    "from pathlib import Path\nPath({mark!r}).write_text('executed')\nraise ImportError('not the real one')\n"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with files that are named as modules are."""
    for name in ("numpy", "token", "ctypes", "tracekit"):
        (tmp_path / f"{name}.py").write_text(SPY.format(mark=str(tmp_path / "executed")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_file_of_the_working_folder_is_executed(folder):
    report = replay([TRACE], providers=["oracle"], claims=["rerun"])

    assert report.find("rerun").status is Status.HELD
    assert not (folder / "executed").exists()


def test_a_kernel_that_is_named_is_found_there_and_hides_nothing(folder):
    (folder / "mine_here.py").write_text(
        "import token\nfrom tracekit.providers.oracle import Oracle\n\n\ndef kernel():\n    return Oracle()\n"
    )

    report = replay([TRACE], providers=["mine_here:kernel"], claims=["rerun"])

    assert report.find("rerun").status is Status.HELD
    assert not (folder / "executed").exists()
