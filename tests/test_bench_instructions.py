"""Instruction counts are as pinned, and a kernel that does more is seen."""

import shutil
from pathlib import Path

import pytest

from tools.bench import instructions
from tools.bench.instructions import Count
from tools.portability.device import KERNELS

needs_valgrind = pytest.mark.skipif(bool(instructions.missing()), reason="valgrind is not installed")


@needs_valgrind
@pytest.mark.parametrize("form", instructions.FORMS)
def test_counts_are_as_pinned(form: str):
    """With another compiler than that of the pins nothing is judged, and the table says so."""
    counts = list(instructions.counts(form))
    assert [one.fault for one in counts if one.fault] == []
    assert all(one.instructions > 1_000_000 for one in counts)


@needs_valgrind
def test_a_kernel_that_does_more_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The control: every score chain is done twice; the bits are the same and no test of bits can see it."""
    for path in KERNELS.glob("tk_*"):
        shutil.copy(path, tmp_path)
    tile = tmp_path / "tk_tile.h"
    text, once = tile.read_text(), "    scores(next);\n"
    assert text.count(once) == 1
    tile.write_text(text.replace(once, once * 2))
    monkeypatch.setattr(instructions, "SHAPES", {"DSV4 T=1": instructions.SHAPES["DSV4 T=1"]})
    (right,) = instructions.counts("AVX2")
    (twice,) = instructions.counts("AVX2", tmp_path)
    assert Count("twice", twice.instructions, right.instructions).fault


def test_less_than_pinned_is_a_fault_too():
    assert not Count("a", 101, 100).fault
    assert Count("a", 103, 100).fault
    assert "97 instructions, pinned are 100" in Count("a", 97, 100).fault
    assert not Count("a", 97).fault


def test_without_the_emulator_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert instructions.main(["--gate"]) == 0
    assert capsys.readouterr().out == "not run: valgrind is not installed\n"
