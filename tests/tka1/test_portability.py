"""One hash for every form, and that the tool which says so can fail."""

from dataclasses import replace
from pathlib import Path

import pytest

import tracekit
from tools.portability import __main__ as portability
from tools.portability.forms import Found, all_forms
from tracekit.providers.tka1 import native, selftest

RIGHT = (selftest.EXPECTED, selftest.EXPECTED_WIDE)
FORM = Found("a", "how", RIGHT)
ROOT = Path(__file__).parents[2]
LISTED = (ROOT / "tests" / "not_run.txt").read_text()


def test_every_form_gives_one_hash_or_is_missing_for_a_listed_reason():
    found = list(all_forms())
    assert portability.faults(found, LISTED) == []
    missing = {f.missing for f in found if f.missing}
    if missing:
        pytest.skip(sorted(missing)[0])
    assert portability.PAGE.read_text() == portability.page(found)


@pytest.mark.parametrize(
    "form",
    [
        replace(FORM, digests=(selftest.EXPECTED, "0")),
        replace(FORM, digests=("0", selftest.EXPECTED_WIDE)),
        replace(FORM, digests=()),
        replace(FORM, digests=(), missing="the dog ate it"),
    ],
)
def test_other_bits_and_unlisted_gaps_are_faults(form: Found):
    assert portability.faults([FORM], "") == []
    assert len(portability.faults([FORM, form], "without x | no nvcc\n")) == 1


def test_a_build_that_is_not_there_is_not_excused_by_the_processor(monkeypatch: pytest.MonkeyPatch):
    """The list excuses processors that do not run a build, and no build that somebody forgot to make."""
    best = native.available()[0]
    assert native.absent(best) == ""
    here = dict(native._files(tuple(tracekit.__path__)))
    monkeypatch.setattr(native, "_files", lambda folders: {i: p for i, p in here.items() if i != best})
    if best == native.BASELINE:
        pytest.skip("this machine does not run v3")
    said = native.absent(best)
    assert said == f"{best} was not built"
    assert len(portability.faults([replace(FORM, digests=(), missing=said)], LISTED)) == 1
    monkeypatch.setattr(native, "_best", lambda folders: 1)
    said = native.absent(best)
    assert said == f"this machine does not run {best}"
    assert portability.faults([replace(FORM, digests=(), missing=said)], LISTED) == []


def test_a_listed_gap_is_none_and_is_shown():
    gap = Found("a", "how", missing="no nvcc")
    assert portability.faults([gap], "# why\nwithout nvcc | no nvcc\n") == []
    assert "not run: no nvcc" in portability.page([gap])
