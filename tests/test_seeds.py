"""docs/seeds.md is held to the tests that it names; the check can fail."""

from pathlib import Path

import pytest

from tools.check_seeds import ROWS, problems

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test_it(): ...\n\n\nTestMachine = object\n")
    return tmp_path


def page(**rows):
    told = dict.fromkeys(ROWS, "`tests/test_a.py::test_it`") | rows
    return "".join(f"| {name} | what | where | {text} |\n" for name, text in told.items())


RAN = {"tests/test_a.py::test_it[one]", "tests/test_a.py::TestMachine::runTest"}


def test_the_page_of_this_repository_is_right():
    listed = (ROOT / "tests" / "seeds_not_run.txt").read_text()
    assert problems((ROOT / "docs" / "seeds.md").read_text(), listed, ROOT) == []


def test_a_page_that_is_right(tree):
    good = page(A2="`tests/test_a.py::TestMachine`; *not run: needs a device*")
    assert problems(good, "# why\nA2 | needs a device\n", tree, RAN) == []


@pytest.mark.parametrize(
    ("text", "listed", "passed", "expected"),
    [
        (page().replace("| A7 |", "| A99 |"), "", RAN, "row A7 is missing"),
        (page(A3="trust us"), "", RAN, "row A3 names no test"),
        (page(A3="`tests/test_b.py::test_it`"), "", RAN, "does not exist"),
        (page(A3="`tests/test_a.py::test_that`"), "", RAN, "does not exist"),
        (page(), "", {"tests/test_a.py::test_it_too"}, "did not pass"),
        (page(A3="*not run: needs luck*"), "", RAN, "not in tests/seeds_not_run.txt: A3 | needs luck"),
        (page(), "A3 | needs luck", RAN, "not on the page: A3 | needs luck"),
    ],
)
def test_what_is_wrong_is_told(tree, text, listed, passed, expected):
    assert any(expected in problem for problem in problems(text, listed, tree, passed))


def test_tests_of_the_engines_must_have_run_where_engines_run(tree):
    (tree / "tests" / "engines_x").mkdir()
    (tree / "tests" / "engines_x" / "test_b.py").write_text("def test_it(): ...\n")
    text, there = page(A4="`tests/engines_x/test_b.py::test_it`"), "tests/engines_x/test_b.py::test_it[a]"
    assert problems(text, "", tree, RAN) == []
    assert problems(text, "", tree, {there}, engines=True) == []
    assert problems(text, "", tree, {"tests/engines_x/test_b.py::test_else"}, engines=True) == [
        "row A4 names tests/engines_x/test_b.py::test_it, which did not pass in this run"
    ]
