"""The command line run in this process: exit code, stdout, stderr."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tracekit.cli.main import run

TRACES = Path(__file__).parents[2] / "traces"


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def tracekit_cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    def call(*arguments: object) -> Done:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture
def prefill() -> Path:
    return TRACES / "smollm2-prefill.sdpa.h5"


@pytest.fixture
def prefill_tka1() -> Path:
    return TRACES / "smollm2-prefill.tka1.h5"
