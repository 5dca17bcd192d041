"""What was not run is counted, with its reason; in CI it must be exactly what `not_run.txt` expects."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

EXPECTED = Path(__file__).with_name("not_run.txt")
_not_run: dict[str, int] = {}


_passed: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", metavar="FILE", help="write the tests that passed, for tools.check_seeds")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.append(report.nodeid)
    if report.skipped:
        _count(report.longrepr)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _count(report.longrepr)


def _count(longrepr: object) -> None:
    reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    entry = reason.removeprefix("Skipped: ")
    _not_run[entry] = _not_run.get(entry, 0) + 1


def expected_here(text: str, here: Callable[[str], bool]) -> set[str]:
    """Return the reasons of `not_run.txt` that count on a machine; `here` says whether it has a thing.

    A line is a reason, or `without THING | reason`; a thing is a build of TKA-1 that the processor runs
    (`v4`), a program (`nvcc`), the library `NVRTC`, or `the pinned compiler`.
    """
    found = set()
    for line in text.splitlines():
        condition, bar, entry = line.partition(" | ")
        if not line.strip() or line.startswith("#"):
            continue
        if not bar:
            found.add(line)
        elif not here(condition.removeprefix("without ")):
            found.add(entry)
    return found


def is_here(thing: str) -> bool:
    """Whether this machine has a thing that a line of `not_run.txt` names."""
    from tools.bench import instructions
    from tracekit.providers.tka1 import native, runtime_compiler

    if thing == "NVRTC":
        return runtime_compiler.find_library("nvrtc") is not None
    if thing == "the pinned compiler":
        return bool(instructions.pinned())
    return native.runs(thing) if thing in native.BUILDS else shutil.which(thing) is not None


def _whole(config: pytest.Config) -> bool:
    """Whether everything runs, and this process sees all of it (a worker of xdist sees a part)."""
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    return everything and not hasattr(config, "workerinput")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    target = session.config.getoption("--passed")
    if target and not hasattr(session.config, "workerinput"):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text("".join(f"{node}\n" for node in _passed))
    if not os.environ.get("CI") or not _whole(session.config) or exitstatus != 0:
        return
    if _unexpected():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _unexpected() -> list[str]:
    wanted = expected_here(EXPECTED.read_text(), is_here)
    return [f"not run, and not listed: {entry}" for entry in sorted(set(_not_run) - wanted)] + [
        f"listed as not run, but it ran: {entry}" for entry in sorted(wanted - set(_not_run))
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for entry, count in sorted(_not_run.items()):
        terminalreporter.write_line(f"not run ({count}): {entry}")
    if os.environ.get("CI") and _whole(config):
        for line in _unexpected():
            terminalreporter.write_line(f"tests/not_run.txt: {line}", red=True)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, for this process and its children, whatever this one has."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
