"""The list of what may stay undone in CI: read right, and able to fail."""

from pathlib import Path

import pytest

from tests.conftest import EXPECTED, expected_here, is_here
from tracekit.providers.tka1 import runtime_compiler

pytest_plugins = ["pytester"]

TEXT = "# why\nno device\nwithout v4 | this machine does not run v4\n\n"


@pytest.mark.parametrize(
    ("builds", "expected"),
    [
        ({"v4", "v3"}, {"no device"}),
        ({"v3"}, {"no device", "this machine does not run v4"}),
    ],
)
def test_conditions(builds, expected):
    assert expected_here(TEXT, builds.__contains__) == expected


@pytest.mark.parametrize(
    ("ci", "listed", "code"), [("1", "", 1), ("1", "no device", 0), ("", "", 0), ("1", "a\nno device", 1)]
)
def test_a_skip_that_is_not_listed_fails_in_ci(pytester, monkeypatch, ci, listed, code):
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    (pytester.path / "not_run.txt").write_text(listed)
    pytester.makeini("[pytest]\ntestpaths = .")
    pytester.makepyfile("""
        import pytest
        def test_runs(): pass
        def test_does_not(): pytest.skip("no device")
    """)
    monkeypatch.setenv("CI", ci)
    assert pytester.runpytest_subprocess().ret == code


@pytest.mark.parametrize("found", [None, Path("libnvrtc.so.13")])
def test_the_tests_of_nvrtc_are_expected_to_run_where_it_is(monkeypatch, found):
    monkeypatch.setattr(runtime_compiler, "find_library", lambda kind: found)
    assert ("no NVRTC library" in expected_here(EXPECTED.read_text(), is_here)) == (found is None)
