"""The run: what it is about, how much time is left, and what was found so far."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu_acceptance.checks import Check, plain
from tools.gpu_acceptance.tree import ROOT


@dataclass
class Run:
    """One acceptance run.

    Args:
        subject: the provider of TKA-1 that is put to the test.
        stand_in: what stands in for a device, or an empty text.
        seconds: that the run may take.
        traces: the goldens.
        folder: for what the run makes.
    """

    subject: str
    stand_in: str
    seconds: float
    traces: tuple[Path, ...]
    folder: Path
    checks: list[Check] = field(default_factory=list)
    made: list[Path] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.started)

    def add(self, stage: str, name: str, status: str, reason: str, **more: Any) -> None:
        """Keep what was found, and show it."""
        check = Check(stage, name, status, plain(reason) or status, **more)
        self.checks.append(check)
        print(
            f"{self.seconds - self.left:6.1f} s  {stage:10} {status:15} {check.provider} {name}: {reason}",
            flush=True,
        )

    def stage(self, name: str, work: Callable[["Run"], None], needs: float) -> None:
        """Do the work of a stage, if there is time for it; a failure is one of the stage alone."""
        if self.left < needs:
            self.add(name, name, "not run", f"less than {needs:.0f} of {self.seconds:.0f} seconds were left")
            return
        with self.failures(name, name):
            work(self)
        if name not in {check.stage for check in self.checks}:
            self.add(name, name, "not run", "there was nothing to do")

    @contextmanager
    def failures(self, stage: str, name: str, provider: str = "") -> Iterator[None]:
        """Turn what fails inside into a check that is inconclusive."""
        try:
            yield
        except Exception as error:  # whatever a library does: what was found before must not be lost
            text = " ".join(str(error).split())[:500]
            self.add(stage, name, "inconclusive", f"{type(error).__name__}: {text}", provider=provider)


def goldens() -> tuple[Path, ...]:
    """The traces of the tree; those of TKA-1 first, for they say most about the device."""
    found = sorted((ROOT / "traces").glob("*.h5"))
    return tuple(sorted(found, key=lambda path: ".tka1." not in path.name))
