"""The words of a report: a number says how much was compared, a refutation says where and what."""

from io import StringIO

from rich.console import Console

from tracekit.report.terminal import render
from tracekit.report.words import summary, verdict_lines
from tracekit.verdict import Compared, Differences, Place, Status, Verdict

HELD = Verdict("rows", "tka1", Status.HELD, "equal", "a.h5", 4, 6, Compared(2, 73728, 1152))
REFUTED = Verdict(
    "solo",
    "torch-flash-cpu",
    Status.REFUTED,
    "differs",
    "a.h5",
    4,
    1,
    Compared(2, 73728, 1152),
    Differences(2019, 101, 1, (("1", 2019),)),
    Place("r0", 5, 0, 0, 3, "out", "0x3f80", "0x3f81", 1.0, 1.0078125, 1),
    "row alone",
    next_command="tracekit replay a.h5 --claim solo",
)
NOT_RUN = Verdict("graph", "tka1", Status.NOT_RUN, "needs a CUDA or HIP device", "a.h5")


def test_a_held_verdict_says_how_much_was_compared():
    assert verdict_lines(HELD) == ["1,152 rows, 73,728 values compared, 6 variants of 4 calls"]


def test_a_refutation_says_where_what_and_what_next():
    text = "\n".join(verdict_lines(REFUTED))
    for part in (
        "2,019 of 73,728 values in 101 rows differ, up to 1 ULP",
        "variant: row alone",
        "first: request r0 position 5 layer 0 head 0 element 3 of out",
        "expected 0x3f80 (1.0), got 0x3f81 (1.0078125), 1 ULP",
        "next: tracekit replay a.h5 --claim solo",
    ):
        assert part in text


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
