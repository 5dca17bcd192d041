"""docs/tka1.md: every rule names tests that exist, and the code cites no rule that is not there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "tka1.md").read_text()
SECTIONS = dict(re.findall(r"^### (S\d+) .*?\n(.*?)(?=^##)", DOCUMENT, re.MULTILINE | re.DOTALL))


def test_the_rules_are_s1_to_s16():
    assert list(SECTIONS) == [f"S{n}" for n in range(1, 17)]


@pytest.mark.parametrize("rule", [f"S{n}" for n in range(1, 17)])
def test_a_built_rule_names_its_tests(rule: str):
    named = re.findall(r"`(test_\w+\.py)`", SECTIONS[rule])
    assert named
    assert all((ROOT / "tests" / "tka1" / name).is_file() for name in named)


def test_the_codes_of_the_errors_are_rules():
    sources = "".join(p.read_text() for p in (ROOT / "tracekit" / "providers" / "tka1").glob("*.py"))
    codes = set(re.findall(r'"(S\d+)-[A-Z]+"', sources))
    assert codes
    assert codes <= set(SECTIONS)
