"""docs/canonical.md lists exactly the refusals of the code, and each has a test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"\bC-[A-Z0-9]+(?:-[A-Z0-9]+)*\b")


def codes(folder: str, pattern: str) -> set[str]:
    return {code for path in (ROOT / folder).glob(pattern) for code in CODE.findall(path.read_text("utf-8"))}


def test_every_refusal_is_documented_and_nothing_else():
    table = (ROOT / "docs/canonical.md").read_text("utf-8").split("## Refusals")[1].split("## Sources")[0]
    assert set(CODE.findall(table)) == codes("tracekit/canonical", "*.py")


def test_every_refusal_has_a_test():
    assert codes("tracekit/canonical", "*.py") - codes("tests/canonical", "test_*.py") == set()
