"""The words of a report: a number says how much was compared, a refutation says where and what."""

from io import StringIO

from rich.console import Console

from tracekit.report.terminal import render
from tracekit.report.words import summary, verdict_lines
from tracekit.verdict import Compared, Differences, Place, Status, Verdict

SOME = Compared(2, 73728, 1152)
PLACE = Place("r0", 5, 0, 0, 3, "out", "0x3f80", "0x3f81", 1.0, 1.0078125, 1)
APART = Differences(2019, 101, 1, (("0", 71709), ("1", 2019)))
HELD = Verdict("rows", "tka1", Status.HELD, "same bits in 6 variants of 4 calls", "a.h5", 4, 6, SOME)
BOUNDED = Verdict(
    "control",
    "tka1",
    Status.BOUNDED,
    "inside the envelope, largest error 43% of its bound",
    compared=SOME,
    differences=APART,
)
REFUTED = Verdict(
    "solo",
    "torch-flash-cpu",
    Status.REFUTED,
    "2,019 of 73,728 values in 101 rows differ, up to 1 ULP; first in variant `row alone`",
    "a.h5",
    compared=SOME,
    differences=APART,
    first=PLACE,
    next_command="tracekit replay a.h5 --claim solo",
)
CUT = Verdict(
    "rows", "tka1", Status.INCONCLUSIVE, "the capture is cut at step 3: a hook failed", "a.h5", compared=SOME
)
NOT_RUN = Verdict("graph", "tka1", Status.NOT_RUN, "needs a CUDA or HIP device", "a.h5")


def test_a_held_verdict_says_how_much_was_compared():
    assert verdict_lines(HELD) == ["same bits in 6 variants of 4 calls: 1,152 rows, 73,728 values"]


def test_a_bounded_verdict_shows_the_part_of_its_bound_and_its_ulps():
    assert verdict_lines(BOUNDED) == [
        "inside the envelope, largest error 43% of its bound: 1,152 rows, 73,728 values",
        "ULPs 0: 71,709 · 1: 2,019",
    ]


def test_an_inconclusive_verdict_says_why_even_when_something_was_compared():
    assert verdict_lines(CUT) == ["the capture is cut at step 3: a hook failed: 1,152 rows, 73,728 values"]


def test_a_refutation_says_where_what_how_far_and_what_next():
    assert verdict_lines(REFUTED) == [
        REFUTED.reason,
        "first: request r0 position 5 layer 0 head 0 element 3 of out",
        "expected 0x3f80 (1.0), got 0x3f81 (1.0078125), 1 ULP",
        "ULPs 0: 71,709 · 1: 2,019",
        "next: tracekit replay a.h5 --claim solo",
    ]


def test_a_claim_that_was_not_run_says_why():
    assert verdict_lines(NOT_RUN) == ["needs a CUDA or HIP device"]


def test_the_last_line_counts():
    assert summary([HELD, REFUTED, NOT_RUN], 1) == "3 claims: 1 held, 1 refuted, 1 not run. exit 1"
    assert summary([], 5) == "0 claims: none. exit 5"


def test_the_verdict_is_a_word_without_any_colour():
    console = Console(width=160, color_system=None, record=True, file=StringIO())
    console.print(render([HELD, REFUTED], 1))
    text = console.export_text()
    assert "REFUTED" in text
    assert "held" in text
