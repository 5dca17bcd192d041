"""What is refused before anything runs: filters, names and limits that fit nothing."""

import pytest

from tracekit.errors import NothingSelected, UsageError
from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call, sparse_call
from tracekit.verdict import Exit

PREFILL = dense_call(lengths=(12, 7), seed=1)
DECODE = dense_call(lengths=(12, 7, 9), new=(1, 1, 1), sink=True, layer=1, step=1, seed=2)
SPARSE = sparse_call(lengths=(24, 13), seed=3)
TRACE = MemoryTrace((PREFILL, DECODE, SPARSE), name="three.h5")


def test_filters_that_leave_nothing_say_what_there_is():
    with pytest.raises(NothingSelected, match="layers 0-1, calls 0-2") as error:
        replay([TRACE], layers=[999])
    assert error.value.exit_code == Exit.NOTHING
    assert error.value.fields["layers"] == [0, 1]


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"calls": [0, 99999]}, "three.h5 has no calls 99999;"),
        ({"layers": [0, 77, 78], "calls": [0, 5]}, "three.h5 has no layers 77-78 and no calls 5;"),
        ({"requests": [str(PREFILL.rows.requests[0]), "gone"]}, "three.h5 has no requests gone;"),
    ],
)
def test_a_part_of_a_filter_that_matches_nothing_is_named(filters, words):
    with pytest.raises(UsageError, match=words) as error:
        replay([TRACE], **filters)
    assert not isinstance(error.value, NothingSelected)


def test_filters_select_calls():
    assert replay([TRACE], providers=["tka1"], claims=["rerun"], layers=[1]).find("rerun").calls == 1
    key = str(SPARSE.rows.requests[0])
    report = replay([TRACE], providers=["tka1"], claims=["rerun"], requests=[key[:12]], calls=[2])
    assert report.find("rerun").calls == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"claims": ["row"]}, "Did you mean rows?"),
        ({"claims": []}, "no claim is named"),
        ({"providers": ["tka2"]}, "Did you mean tka1?"),
        ({"timeout": float("nan")}, "the timeout is nan; it must be a number of seconds above 0"),
        ({"timeout": float("inf")}, "up to 1,000,000"),
        ({"timeout": 3_000_000}, "the timeout is 3e+06"),
        ({"timeout": 0}, "the timeout is 0"),
    ],
)
def test_names_that_do_not_exist_are_refused_before_anything_runs(arguments, words):
    with pytest.raises(UsageError) as error:
        replay([TRACE], **arguments)
    assert words in str(error.value)


def test_a_replay_of_nothing_is_refused():
    with pytest.raises(UsageError, match="no trace is given"):
        replay([])
