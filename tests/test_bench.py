"""`python -m tools.bench`: what it prints, writes and ends with. No test here asserts a time."""

import json
from pathlib import Path

import pytest

from tools.bench import __main__ as bench
from tools.bench.timing import Row, compare

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


def test_the_rows_are_written_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    run(monkeypatch, "--json", str(tmp_path / "rows.json"))
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [(r["name"], r["ratio"], r["ok"]) for r in written] == [("fast", 2.0, True), ("slow", 1.2, False)]


def test_every_function_runs_in_every_round():
    calls: list[str] = []
    row = compare("x", lambda: calls.append("ours"), {"a": lambda: calls.append("a")}, 1.0, rounds=2)
    assert calls == ["ours", "ours", "a", "a"] * 2  # an untimed call before each timed one
    assert row.peer_name == "a"
