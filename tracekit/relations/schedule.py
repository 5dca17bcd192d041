"""`schedule`: how a launch is cut and in which order its work is done changes no bit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tracekit.controls.schedule import CutWhereScheduled
from tracekit.model import AttentionCall
from tracekit.providers.base import Capabilities, Execution, Launch, Provider
from tracekit.relations.base import Expectation, Variant

THREADS = (1, 3)


@dataclass(frozen=True)
class Schedule:
    """Who computes what, and when, decides no sum.

    A variant counts only where the kernel says that it ran in another way than the baseline (`Rescheduled`).

    Args:
        schedules: names that the kernel can be asked for.
    """

    schedules: tuple[str, ...] = ()
    id: ClassVar[str] = "schedule"
    promise: ClassVar[str] = "the same bits in every schedule that the kernel can be asked for"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def on(self, capabilities: Capabilities) -> "Schedule":
        """Ask a kernel for the schedules that it takes."""
        return Schedule(capabilities.schedules)

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a kernel that takes schedules."""
        return None if self.schedules else "the kernel takes no schedules"

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call on 1 and 3 threads, and in each schedule."""
        for threads in THREADS:
            name = f"{threads} thread{'s' if threads > 1 else ''}"
            yield Variant(name, Launch((call,), Execution(threads=threads)))
        for name in self.schedules:
            yield Variant(name, Launch((call,), Execution(schedule=name)))

    def broken(self) -> Provider:
        """Return a kernel that cuts its sums where the schedule cuts the work."""
        return CutWhereScheduled()
