"""One hash for every form, and that the tool which says so can fail."""

from dataclasses import replace
from pathlib import Path

import pytest

from tools.portability import __main__ as portability
from tools.portability.forms import Found, all_forms
from tracekit.providers.tka1 import selftest

RIGHT = (selftest.EXPECTED, selftest.EXPECTED_WIDE)
FORM = Found("a", "how", RIGHT)
ROOT = Path(__file__).parents[2]


def test_every_form_gives_one_hash_or_is_missing_for_a_listed_reason():
    found = list(all_forms())
    assert portability.faults(found, (ROOT / "tests" / "not_run.txt").read_text()) == []
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


def test_a_listed_gap_is_none_and_is_shown():
    gap = Found("a", "how", missing="no nvcc")
    assert portability.faults([gap], "# why\nwithout nvcc | no nvcc\n") == []
    assert "not run: no nvcc" in portability.page([gap])
