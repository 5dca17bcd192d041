"""The plugin as a user has it: a marked test, a golden, a pass or a failure that says where."""

from pathlib import Path

import numpy  # noqa: F401 - loaded before pytester, which would import it a second time
import pytest

pytest_plugins = ["pytester"]

GOLDEN = Path(__file__).parents[1] / "traces" / "qwen3-batch.sdpa.h5"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    (pytester.path / "golden.h5").write_bytes(GOLDEN.read_bytes())
    return pytester


def test_a_kept_promise_passes(project):
    project.makepyfile("""
        import pytest
        @pytest.mark.tracekit("golden.h5", claims=["rows", "solo"], provider="tka1")
        def test_it(golden):
            report = golden.check()
            assert len(report.verdicts) == 2
    """)
    result = project.runpytest_inprocess("--strict-markers", "--junitxml=report.xml")
    result.assert_outcomes(passed=1)
    assert '<property name="tracekit tka1 solo" value="held"' in (project.path / "report.xml").read_text()


def test_a_broken_promise_fails_with_its_place(project):
    project.makepyfile("""
        import pytest
        BROKEN = "tracekit.controls.decode:LengthOffByOne"
        @pytest.mark.tracekit("golden.h5", claims=["decode"], provider=BROKEN)
        def test_it(golden):
            golden.check()
    """)
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*decode: refuted", "*values in*rows differ*", "*first: request*"])


def test_a_command_line_option_changes_the_kernel(project):
    project.makepyfile("""
        import pytest
        @pytest.mark.tracekit("golden.h5", claims=["rerun"])
        def test_it(golden):
            assert {v.provider for v in golden.check().verdicts} == {"tka1-numpy"}
    """)
    project.runpytest_inprocess("--tracekit-provider=tka1-numpy").assert_outcomes(passed=1)


def test_nothing_compared_does_not_pass(project):
    project.makepyfile("""
        import pytest
        @pytest.mark.tracekit("golden.h5", claims=["recorded"], provider="tka1")
        def test_it(golden):
            golden.check()
    """)
    project.runpytest_inprocess().assert_outcomes(failed=1)


@pytest.mark.parametrize("marker", ["", "@pytest.mark.tracekit('missing.h5')"])
def test_a_missing_marker_or_trace_is_an_error(project, marker):
    project.makepyfile(f"""
        import pytest
        {marker}
        def test_it(golden):
            golden.check()
    """)
    project.runpytest_inprocess().assert_outcomes(errors=1)
