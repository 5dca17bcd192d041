"""Verdicts: nothing compared is never held, and a refutation is never masked."""

import itertools

import pytest

from tracekit.errors import ProviderFailed
from tracekit.verdict import EVIDENCE, Compared, Exit, Place, Status, Verdict, exit_code, worst

SOME = Compared(1, 4, 2)
PLACE = Place("r", 0, 0, 0, 0, "out", "0x3f80", "0x3f81", 1.0, 1.0078125, 1)


def verdict(status: Status, claim: str = "rows", compared: Compared = SOME) -> Verdict:
    return Verdict(claim, "tka1", status, "because", compared=compared, first=PLACE)


@pytest.mark.parametrize("status", sorted(EVIDENCE))
def test_nothing_compared_is_never_evidence(status):
    with pytest.raises(ValueError, match="nothing was compared"):
        verdict(status, compared=Compared())


def test_refuted_needs_a_place():
    with pytest.raises(ValueError, match="first differing place"):
        Verdict("rows", "tka1", Status.REFUTED, "because", compared=SOME)


def test_every_verdict_needs_a_reason():
    with pytest.raises(ValueError, match="reason"):
        Verdict("rows", "tka1", Status.NOT_RUN, "")


@pytest.mark.parametrize("codes", list(itertools.permutations([0, 1, 2, 3, 4, 5, 6], 3)))
def test_the_worst_code_is_the_first_of_the_order(codes):
    order = [1, 2, 6, 3, 4, 5, 0]
    assert worst(codes) == min(codes, key=order.index)


@pytest.mark.parametrize(
    ("statuses", "named", "code"),
    [
        ([Status.HELD, Status.BOUNDED], set(), Exit.OK),
        ([Status.HELD, Status.REFUTED, Status.INCONCLUSIVE], set(), Exit.REFUTED),
        ([Status.HELD, Status.INCONCLUSIVE], set(), Exit.INCONCLUSIVE),
        ([Status.HELD, Status.NOT_RUN], set(), Exit.OK),
        ([Status.HELD, Status.NOT_RUN], {"rows"}, Exit.NOT_RUN),
        ([Status.NOT_RUN], {"rows"}, Exit.NOT_RUN),
        ([Status.NOT_RUN], set(), Exit.NOTHING),
        ([Status.NOT_APPLICABLE], {"rows"}, Exit.NOTHING),
        ([Status.OBSERVED_VARIES], set(), Exit.OK),
        ([], set(), Exit.NOTHING),
    ],
)
def test_exit_codes(statuses, named, code):
    assert exit_code([verdict(status) for status in statuses], frozenset(named)) == code


def test_calls_left_out_count_for_a_named_claim_only():
    part = Verdict("rows", "tka1", Status.HELD, "because", compared=SOME, left_out=1)
    probed = Verdict("rows", "tka1", Status.OBSERVED_SAME, "because", compared=SOME, left_out=1)
    named = frozenset({"rows"})
    assert (exit_code([part]), exit_code([part], named), exit_code([probed], named)) == (0, 4, 0)


def test_an_error_survives_pickling_with_its_facts():
    import pickle

    error = pickle.loads(pickle.dumps(ProviderFailed("it died.", rule="P-DIED", signal=11)))
    assert (str(error), error.rule, error.fields) == ("it died.", "P-DIED", {"signal": 11})


def test_json_has_words_for_what_it_cannot_say():
    import json

    place = Place("r", 0, 0, 0, None, "lse", "0xff800000", "0x7fc00000", float("-inf"), float("nan"))
    told = Verdict("rows", "tka1", Status.REFUTED, "because", compared=SOME, first=place).to_dict()
    again = json.loads(json.dumps(told, allow_nan=False))
    assert (again["first"]["expected"], again["first"]["actual"]) == ("-inf", "nan")
