"""Each broken rule of docs/format.md is refused under its own code."""

import importlib
import re
from pathlib import Path

import pytest

from tracekit.errors import TraceCorrupt, TraceTooNew
from tracekit.store import open_trace, verify_trace

HERE = Path(__file__).parent
BUILDERS = sorted(path.stem for path in HERE.glob("e[0-9][0-9]_*.py"))
FORMAT = HERE.parents[1] / "docs" / "format.md"
ONLY_VERIFY = {"E-22", "E-23", "E-24"}


@pytest.mark.parametrize("name", BUILDERS)
def test_rule(name, tmp_path, monkeypatch):
    builder = importlib.import_module(f"tests.malformed.{name}")
    path = tmp_path / "x.h5"
    builder.build(path)
    for target, value in getattr(builder, "PATCH", {}).items():
        monkeypatch.setattr(target, value)

    violations = verify_trace(path)
    assert builder.RULE in {violation.rule for violation in violations}
    assert all(violation.message for violation in violations)
    if builder.RULE in ONLY_VERIFY:
        assert [violation.rule for violation in violations] == [builder.RULE]
        return
    with pytest.raises((TraceCorrupt, TraceTooNew)) as refused, open_trace(path, threads=1) as trace:
        _ = trace.recording, trace.heads, list(trace), list(trace.indexer_calls())
    assert refused.value.rule == builder.RULE
    assert isinstance(refused.value, TraceTooNew) is (builder.RULE == "E-02")


def test_every_rule_has_a_file():
    rules = set(re.findall(r"^\| (E-\d\d) \|", FORMAT.read_text(), re.MULTILINE))
    assert rules == {f"E-{name[1:3]}" for name in BUILDERS}
