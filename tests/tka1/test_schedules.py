"""S15: every schedule gives the bytes of the usual one, and the kernel's account says what was followed."""

import pytest

from tests.tka1.cases import CASES, case, difference
from tracekit.errors import Unsupported
from tracekit.providers import tka1
from tracekit.providers.tka1.native import Library
from tracekit.providers.tka1.schedules import SCHEDULES, Ran, Schedule


@pytest.mark.parametrize("name", CASES)
def test_no_schedule_changes_a_bit(best: Library, name: str):
    inputs = case(name)
    usual = best.run(inputs, 2)
    for schedule in SCHEDULES.values():
        for threads in (1, 3):
            assert difference(best.run_as(inputs, threads, schedule)[0], usual) == ""


def account(build: Library, name: str, schedule: Schedule, threads: int = 1) -> str | None:
    return build.run_as(case(name), threads, schedule)[1]


@pytest.mark.parametrize(
    ("schedule", "name", "words"),
    [
        ("tiles of one row", "causal, D 64", "tiles of 1 x 2 "),
        ("tiles of 5 rows", "causal, D 64", "tiles of 5 x 2 "),
        ("tiles of one head", "causal, D 64", " x 1 rows"),
        ("each leaf apart", "decode", "runs 6,"),
        ("runs of 2 leaves", "decode", "runs 3,"),
        ("work backward", "causal, D 64", "(3 2 1 0)"),
        ("every other item first", "causal, D 64", "(0 2 1 3)"),
        ("keys in tiles", "decode", "tiles of"),
        ("keys streamed", "causal, D 64", "streams of"),
    ],
)
def test_the_account_shows_what_was_asked_for(best: Library, schedule: str, name: str, words: str):
    usual = account(best, name, Schedule())
    assert words not in usual
    assert words in account(best, name, SCHEDULES[schedule])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_account_counts_threads(best: Library, threads: int):
    assert account(best, "causal, D 64", Schedule(rows=1), threads).endswith(f"threads {threads}")


def test_what_cannot_be_followed_is_not_said_to_be(best: Library):
    assert account(best, "decode", SCHEDULES["tiles of one head"]) is None  # streams take all heads
    assert account(best, "binary32", SCHEDULES["keys streamed"]) is None
    assert account(best, "MHA, odd dims", Schedule(leaves=256)) is None  # one run: nothing is apart


def test_an_account_of_something_else_is_not_taken_for_obedience():
    ran = Ran(threads=1, path=1, items=3, runs=1, rows=4, heads=2, taken=(0, 1, 2))
    assert ran.followed(Schedule(rows=4, heads=2, path=1))
    for asked in (
        Schedule(rows=3),
        Schedule(heads=1),
        Schedule(leaves=1),
        Schedule(order=1),
        Schedule(path=2),
    ):
        assert not ran.followed(asked)


def test_a_schedule_that_is_none_is_refused():
    with pytest.raises(Unsupported, match="no schedule 'sideways'") as error:
        tka1.scheduled(case("decode"), "sideways")
    assert error.value.rule == "P-SCHEDULE"
