"""A trace that cannot be read to its end takes nothing away from what was found before."""

from dataclasses import dataclass

import pytest

from tracekit.errors import TraceCorrupt
from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call
from tracekit.verdict import Exit, Status

CALL = dense_call(lengths=(6, 4), seed=1)
SPOILED = "tests.replayer.faulty:spoiled"


@dataclass(frozen=True)
class Damaged(MemoryTrace):
    """A trace whose calls from `broken` on cannot be read."""

    broken: int = 1

    def call(self, index):
        if index >= self.broken:
            raise TraceCorrupt(f"chunk 3 of call {index} is damaged.", rule="E-19")
        return super().call(index)


def test_a_refutation_before_the_damage_stands():
    report = replay([Damaged((CALL, CALL), name="half.h5")], providers=[SPOILED], claims=["solo", "rerun"])

    assert report.find("solo").status is Status.REFUTED
    assert report.exit_code == Exit.REFUTED
    assert report.find("rerun").status is Status.INCONCLUSIVE
    assert report.find("rerun").reason.startswith("the trace could not be read to its end")
    (error,) = report.to_dict()["errors"]
    assert error["message"] == "half.h5: chunk 3 of call 1 is damaged."
    assert (error["rule"], error["exit_code"]) == ("E-19", Exit.USAGE)


def test_nothing_is_held_on_what_is_left_of_a_trace():
    report = replay([Damaged((CALL, CALL))], providers=["oracle"], claims=["rerun"])

    assert report.status is Status.INCONCLUSIVE
    assert report.exit_code == Exit.USAGE


@pytest.mark.parametrize("order", [1, -1])
def test_a_damaged_trace_beside_a_refuted_one(order):
    traces = [MemoryTrace((CALL,), name="good.h5"), Damaged((CALL,), name="bad.h5", broken=0)][::order]

    report = replay(traces, providers=[SPOILED], claims=["solo"])

    assert [verdict.status for verdict in report.verdicts] == [Status.REFUTED]
    assert report.exit_code == Exit.REFUTED
    assert [error["trace"] for error in report.errors] == ["bad.h5"]


def test_where_nothing_was_found_the_error_is_raised():
    with pytest.raises(TraceCorrupt, match="call 0 is damaged"):
        replay([Damaged((CALL,), broken=0)], providers=["oracle"])
