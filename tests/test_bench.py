"""`python -m tools.bench`: what it prints, writes and ends with. No test here asserts a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench import __main__ as bench
from tools.bench import kernels, record
from tools.bench.kernels_shapes import Times
from tools.bench.timing import Row, compare, exit_code

ROWS = [Row("fast", 1.0, 2.0, "peer", 1.5), Row("slow", 1.0, 1.2, "peer", 1.5)]


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setitem(bench.BENCHES, "kernels", lambda rounds: ROWS)
    monkeypatch.setattr("sys.argv", ["bench", "kernels", *options])
    return bench.main()


def test_a_missed_gate_is_shown_and_is_an_error_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:6] == ["fast", "1000.00", "2000.00", "2.00", "1.5", "yes"]
    assert lines[2].split()[5] == "no"
    assert run(monkeypatch, "--gate") == 1


UNRUN = Row.unrun("gone", "no such processor", 1.5)
SHOWN = Row.unrun("AMX", "no matrix units")


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([ROWS[0]], 0),
        ([ROWS[0], SHOWN], 0),  # what has no gate is not judged anywhere
        ([ROWS[0], UNRUN], 3),
        ([*ROWS, UNRUN], 1),
        ([SHOWN], 3),
        ([], 3),
    ],
)
def test_a_gate_that_was_not_judged_is_not_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: list[Row], code: int
):
    monkeypatch.setitem(bench.BENCHES, "kernels", lambda rounds: rows)
    monkeypatch.setattr("sys.argv", ["bench", "kernels", "--gate"])
    assert bench.main() == code
    said = (
        "inconclusive: gone gave no time here, so the gates of these say nothing." in capsys.readouterr().out
    )
    assert said == (UNRUN in rows)
    assert UNRUN.ok is None
    assert UNRUN.to_dict()["ok"] is None


@pytest.mark.parametrize("ours", [0.0, -1e-7, float("nan")])
def test_a_time_that_is_none_judges_nothing(ours: float):
    """A difference of two times may come out below zero."""
    row = Row("added", ours, 1e-6, "budget", 1.0)
    assert row.ok is None
    assert exit_code([row]) == 3
    bench.line(row)


@pytest.mark.parametrize("options", [[], ["--gate"]])
def test_a_process_that_fails_is_no_missed_gate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
):
    def failing(rounds: int) -> list[Row]:
        subprocess.run([sys.executable, "-c", "raise SystemExit(1)"], check=True)
        raise AssertionError

    monkeypatch.setitem(bench.BENCHES, "kernels", failing)
    monkeypatch.setattr("sys.argv", ["bench", "kernels", *options])
    assert bench.main() == 6
    assert "ended with 1; run it alone" in capsys.readouterr().out


def test_no_rounds_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--rounds", "0")
    assert ended.value.code == 2
    assert "0 is no number of rounds" in capsys.readouterr().err


def test_the_rows_are_written_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    run(monkeypatch, "--json", str(tmp_path / "rows.json"))
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [(r["name"], r["ratio"], r["ok"]) for r in written] == [("fast", 2.0, True), ("slow", 1.2, False)]


def test_every_function_runs_in_every_round():
    calls: list[str] = []
    row = compare("x", lambda: calls.append("ours"), {"a": lambda: calls.append("a")}, 1.0, rounds=2)
    assert calls == ["ours", "ours", "a", "a"] * 2  # an untimed call before each timed one
    assert row.peer_name == "a"


def test_a_row_without_a_gate_is_neither_ok_nor_missed():
    assert bench.line(Row("AMX prefill", 2.0, 1.0, "torch bf16, bound 0.87", 0.0)).split()[5:7] == ["-", "-"]


def test_what_cannot_run_here_says_why_and_is_no_row_that_passed(monkeypatch: pytest.MonkeyPatch):
    """On a processor without AVX-512, AVX2 or matrix units nothing is timed and nothing is called ok."""
    monkeypatch.setattr(kernels.native, "runs", lambda isa: isa == "v1")
    rows = kernels.rows(1)
    assert exit_code(rows) == 3
    assert [bool(row.gate) for row in rows] == [True, True, False]
    lines = [bench.line(row) for row in rows]
    assert [line.split(":")[-1].strip() for line in lines] == [
        "this processor has no AVX-512",
        "this processor has no AVX2",
        "this processor has no AVX-512",
    ]
    monkeypatch.setattr(kernels.native, "runs", lambda isa: True)
    monkeypatch.setattr(kernels.native, "available", lambda: ["v1"])
    assert kernels.missing(kernels.ARENAS[0]) == "v4 was not built"
    monkeypatch.setattr(kernels.native, "available", lambda: ["v4"])
    monkeypatch.setattr(kernels, "cpu_flags", lambda: ["avx512f"])
    assert kernels.missing(kernels.ARENAS[-1]) == "this processor has no matrix units for bf16"


def test_every_shape_of_an_arena_is_judged_with_its_own_gate():
    times = [
        Times(f"shape {number}", 1.0, {"torch bf16": 1.2, "torch fp32": 3.0}, 0.7) for number in range(4)
    ]
    wide, narrow, amx = (kernels.judged(arena, times) for arena in kernels.ARENAS)
    assert [(row.ratio, row.ok) for row in wide] == [
        (1.2, False),
        (1.2, False),
        (1.2, True),
        (1.2, False),
        (0.7, True),
        (0.7, True),
    ]
    assert [row.ok for row in narrow] == [True] * 4
    assert {row.gate for row in amx} == {0.0}
    assert amx[0].peer_name == "torch bf16, bound 1.71"


def test_a_peer_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch):
    """Nothing is timed here: the contenders of a step are, and what is missing of them."""
    seconds = {"plain": 1.0, "recorded": 1.0, "torch.save": 2.0}
    monkeypatch.setattr(record, "load_model", lambda name: (Model(), None))
    monkeypatch.setattr(record, "recording", lambda model, session: None)
    monkeypatch.setattr(record, "in_turn", lambda step, model, contenders, rounds: seconds)
    monkeypatch.setattr(record, "filtered_out", lambda model, rounds: ROWS[0])
    monkeypatch.setattr(record, "probe", dict)
    rows = record.rows(1)
    assert exit_code(rows) == 3
    assert [row.name for row in rows if row.not_run] == ["peer mindstudio-probe"]
    seconds["mindstudio-probe"] = 3.0
    monkeypatch.setattr(record, "probe", lambda: {"mindstudio-probe": None})
    assert exit_code(record.rows(1)) == 0


class Model:
    """As much of a model as the table of a bench needs."""

    def set_attn_implementation(self, name: str) -> None: ...
