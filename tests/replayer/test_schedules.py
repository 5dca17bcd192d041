"""`schedule` counts what a kernel says that it ran, and nothing that it was merely asked for."""

import pytest

from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call
from tracekit.verdict import Status

PREFILL = dense_call(lengths=(160, 40), seed=1)


def judged(kernel: str, *calls):
    report = replay([MemoryTrace(calls)], providers=[kernel], claims=["schedule"], threads=2)
    (verdict,) = report.verdicts
    return verdict


def test_tka1_holds_it_and_names_what_it_could_not_run():
    verdict = judged("tka1", PREFILL)
    assert verdict.status is Status.HELD
    assert verdict.control == "twin-schedule refuted"
    assert verdict.variants >= 8
    assert "could not be run: " in verdict.reason


@pytest.mark.parametrize(
    ("kernel", "status", "words"),
    [
        ("TellsNoSchedule", Status.INCONCLUSIVE, "does not say in which schedule"),
        ("IgnoresSchedules", Status.NOT_APPLICABLE, "the call has no variant"),
        ("ReadsHalf", Status.REFUTED, "first in variant `tiles of one row`"),
    ],
)
def test_a_kernel_that_does_otherwise(kernel, status, words):
    verdict = judged(f"tests.replayer.faulty:{kernel}", PREFILL)
    assert verdict.status is status
    assert words in verdict.reason


def test_a_kernel_without_schedules_is_not_asked():
    assert judged("tka1-numpy", PREFILL).status is Status.NOT_APPLICABLE
    assert judged("torch-flash-cpu", PREFILL).status is Status.NOT_APPLICABLE
