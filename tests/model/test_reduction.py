"""A reduction says everything that decides the bits of a merge; two that differ anywhere are a mismatch."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import InvalidCall
from tracekit.model import (
    TKA1_REDUCTION,
    Downcast,
    DType,
    LseBase,
    MergeOrder,
    PartialState,
    ReductionSpec,
    SinkPlace,
    Tree,
    parse_reduction,
)

SPECS = st.builds(
    ReductionSpec,
    st.sampled_from(Tree),
    st.integers(1, 4096),
    st.sampled_from(PartialState),
    st.sampled_from(LseBase),
    st.sampled_from(DType),
    st.sampled_from(MergeOrder),
    st.sampled_from(Downcast),
    st.sampled_from(SinkPlace),
)


@given(SPECS)
def test_a_reduction_survives_its_document(spec: ReductionSpec):
    assert parse_reduction(spec.to_dict()) == spec
    assert spec.differences(spec) == {}


@given(SPECS, SPECS)
def test_equal_reductions_are_those_without_differences(one: ReductionSpec, two: ReductionSpec):
    assert (one == two) == (not one.differences(two))


@pytest.mark.parametrize(
    "change",
    [
        {"tree": Tree.LEFT_FOLD},
        {"leaf": 64},
        {"partial": PartialState.OUT_LSE},
        {"lse_base": LseBase.TWO},
        {"accumulate": DType.BFLOAT16},
        {"order": MergeOrder.ARRIVAL},
        {"downcast": Downcast.PER_BLOCK},
        {"sink": SinkPlace.FIRST_PARTIAL},
    ],
)
def test_every_field_is_a_mismatch_of_its_own(change):
    assert set(TKA1_REDUCTION.differences(replace(TKA1_REDUCTION, **change))) == set(change)


def test_every_field_was_tried():
    assert len(fields(ReductionSpec)) == 8


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"order": MergeOrder.ARRIVAL}, "arrival"),
        ({"order": MergeOrder.RANK}, "rank"),
        ({"accumulate": DType.BFLOAT16}, "bfloat16"),
        ({"downcast": Downcast.PER_BLOCK}, "per_block"),
        ({"sink": SinkPlace.EVERY_PARTIAL}, "every partial"),
    ],
)
def test_a_reduction_outside_the_mandate_says_which_part_is(change, word):
    assert TKA1_REDUCTION.unsupported() is None
    assert word in (replace(TKA1_REDUCTION, **change).unsupported() or "")


@pytest.mark.parametrize(
    "change",
    [
        {"tree": "right_fold"},
        {"leaf": "128"},
        {"leaf": True},
        {"leaf": 0},
        {"accumulate": "float12"},
        {"more": 1},
    ],
)
def test_nothing_is_filled_in_or_guessed(change):
    with pytest.raises(InvalidCall) as error:
        parse_reduction({**TKA1_REDUCTION.to_dict(), **change})
    assert error.value.rule == "M-REDUCTION"


@pytest.mark.parametrize("name", [field.name for field in fields(ReductionSpec)])
def test_a_missing_field_is_named(name: str):
    document = TKA1_REDUCTION.to_dict()
    del document[name]
    with pytest.raises(InvalidCall, match=name):
        parse_reduction(document)
