"""Instruction counts are as pinned, and a kernel that does more is seen."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import is_here
from tools.bench import instructions
from tools.bench.instructions import Count
from tools.portability.device import KERNELS

MISSING = instructions.missing()
needs_valgrind = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.mark.parametrize("form", instructions.FORMS)
def test_counts_are_as_pinned(form: str):
    """With another compiler than that of the pins nothing is judged, and it counts as not run."""
    if not instructions.pinned():
        pytest.skip("the instruction counts are pinned for another compiler")
    if MISSING:
        pytest.skip(MISSING)
    counts = list(instructions.counts(form))
    assert [one.fault for one in counts if one.fault] == []
    assert all(one.pinned for one in counts)
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


@pytest.mark.parametrize("option", ["--gate", "--pin"])
def test_without_the_emulator_nothing_is_judged_and_the_gate_is_not_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
):
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert instructions.main([]) == 0
    assert instructions.main([option]) == 3
    said = (
        "not run: valgrind is not installed, so nothing was counted; it is judged on a machine that has it.\n"
    )
    assert capsys.readouterr().out == said * 2


@pytest.mark.parametrize(
    ("counts", "code"),
    [
        ([Count("a", 100, 100)], 0),
        ([Count("a", 100, 100), Count("b", 100)], 3),
        ([Count("a", 110, 100), Count("b", 100)], 1),
        ([], 3),
    ],
)
def test_the_gate_is_0_only_where_every_count_was_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], counts: list[Count], code: int
):
    monkeypatch.setattr(instructions, "missing", lambda: "")
    monkeypatch.setattr(instructions, "FORMS", {"AVX2": ()})
    monkeypatch.setattr(instructions, "counts", lambda form: iter(counts))
    assert instructions.main(["--gate"]) == code
    assert ("inconclusive: " in capsys.readouterr().out) == (code == 3 or len(counts) == 2)


def test_a_count_that_fails_is_no_missed_gate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """Sources that do not compile."""
    (tmp_path / "tk_host.cpp").write_text("#error broken\n")
    monkeypatch.setattr(instructions, "missing", lambda: "")
    real = instructions.counts
    monkeypatch.setattr(instructions, "counts", lambda form: real(form, tmp_path))
    assert instructions.main(["--gate"]) == 6
    assert "counting failed: `c++` ended with 1" in capsys.readouterr().out


def test_pins_of_another_compiler_judge_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The control: the same file, whose compiler is another version."""
    told = json.loads(instructions.PINNED.read_text())
    pins = tmp_path / "instructions.json"
    monkeypatch.setattr(instructions, "PINNED", pins)
    for version, judged in ((instructions.compiler(), True), (f"{instructions.compiler()}.1", False)):
        pins.write_text(json.dumps({**told, "compiler": version}))
        assert bool(instructions.pinned()) == judged
        assert is_here("the pinned compiler") == judged
