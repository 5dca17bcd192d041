"""The pytest plugin: hooks and fixtures only.

    @pytest.mark.tracekit("traces/qwen3-batch.sdpa.h5", claims=["solo", "rows"], provider="tka1")
    def test_attention_is_batch_invariant(golden):
        golden.check()

Options carry the prefix `--tracekit-`, because other plugins own the plain names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tracekit.replayer import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("tracekit", "golden traces of attention")
    group.addoption("--tracekit-provider", metavar="ID", help="replay goldens with this kernel instead")
    group.addoption("--tracekit-claims", metavar="ID,...", help="judge only these claims")
    group.addoption("--tracekit-details", action="store_true", help="print the whole report of each golden")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "tracekit(trace, claims=None, provider=None): the golden trace of a test, and what to judge on it",
    )


@dataclass(frozen=True)
class Golden:
    """A golden trace as a test sees it.

    Args:
        path: the trace.
        claims: claims to judge; None is every claim that the kernel promises.
        provider: the kernel; None is TKA-1 and the recorded kernel.
        details: whether `check` prints its report.
    """

    path: Path
    claims: Sequence[str] | None
    provider: str | None
    details: bool
    tell: Callable[[str, object], None]

    def replay(self, **options: Any) -> "Report":
        """Replay the trace; options are those of `tracekit.replay`."""
        import tracekit

        options.setdefault("claims", self.claims)
        options.setdefault("provider", self.provider)
        return tracekit.replay(self.path, **options)

    def check(self, **options: Any) -> "Report":
        """Replay the trace and fail the test unless every judged claim is held or bounded."""
        from tracekit.report.words import summary, verdict_lines

        report = self.replay(**options)
        for verdict in report.verdicts:
            self.tell(f"tracekit {verdict.provider} {verdict.claim}", verdict.status.value)
        lines = [
            "\n    ".join(
                [f"{verdict.provider} {verdict.claim}: {verdict.status.value}", *verdict_lines(verdict)]
            )
            for verdict in report.verdicts
        ]
        lines += [str(error["message"]) for error in report.errors]
        lines.append(summary(report.verdicts, report.exit_code))
        if self.details:
            print("\n".join(lines))
        if report.exit_code:
            pytest.fail("\n".join([str(self.path), *lines]), pytrace=False)
        return report


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Give the golden trace that the test's marker `tracekit` names, relative to the root folder."""
    marker = request.node.get_closest_marker("tracekit")
    if marker is None or not marker.args:
        raise pytest.UsageError(
            f"{request.node.nodeid}: the fixture `golden` needs @pytest.mark.tracekit('path/to/trace.h5')"
        )
    config = request.config
    path = config.rootpath / marker.args[0]
    if not path.is_file():
        raise pytest.UsageError(f"{request.node.nodeid}: there is no trace {path}")
    named = config.getoption("--tracekit-claims")
    return Golden(
        path=path,
        claims=named.split(",") if named else marker.kwargs.get("claims"),
        provider=config.getoption("--tracekit-provider") or marker.kwargs.get("provider"),
        details=bool(config.getoption("--tracekit-details")),
        tell=lambda name, value: request.node.user_properties.append((name, value)),
    )
