"""S2, S3: the keys of a row are a set of absolute row ids; what is not a set is refused by name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tka1.cases import bf16, difference, gqa, lists, shared
from tracekit.errors import InvalidCall
from tracekit.model.bits import DType
from tracekit.providers.tka1 import Inputs, Lists, Ranges, attention


def small(selection: Ranges | Lists, rows: int = 1) -> Inputs:
    rng = np.random.default_rng(0)
    return gqa(rng, rows=rows, heads=2, kv_heads=1, dims=(8, 4), length=300, selection=selection)


@given(
    st.lists(st.integers(0, 299), unique=True, max_size=40),
    st.lists(st.integers(0, 40), max_size=6),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_order_and_holes_mean_nothing(ids: list[int], holes: list[int], random: Any):
    shuffled = list(ids)
    random.shuffle(shuffled)
    for at in holes:
        shuffled.insert(at, -1)

    got = small(lists([np.array(shuffled)]))

    assert got.families[0].selection.ids.tolist() == sorted(ids)
    assert difference(attention(got), attention(small(lists([np.array(sorted(ids))])))) == ""


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_a_range_is_the_list_of_its_ids(bounds: list[tuple[int, int]]):
    lo, hi = np.array(bounds, np.int64).T
    ranged = small(Ranges(lo, hi), len(bounds))
    listed = small(lists([np.arange(a, b) for a, b in bounds]), len(bounds))

    for form in ("auto", "numpy"):
        assert difference(attention(ranged, form=form), attention(listed, form=form)) == ""


@pytest.mark.parametrize(
    ("ids", "rule"),
    [
        ([3, 7, 3], "S3-DUPLICATE"),
        ([3, -2], "S3-NEGATIVE"),
        ([3, 300], "S3-OUTSIDE"),
    ],
)
def test_what_is_no_set_of_given_rows_is_refused(ids: list[int], rule: str):
    with pytest.raises(InvalidCall) as error:
        small(lists([np.array([1]), np.array(ids)]), 2)
    assert error.value.rule == rule
    assert error.value.fields["row"] == 1


@pytest.mark.parametrize("bounds", [(-1, 4), (290, 301)])
def test_a_range_outside_the_given_rows_is_refused(bounds: tuple[int, int]):
    with pytest.raises(InvalidCall) as error:
        small(Ranges(*np.array(bounds, np.int64)[:, None]))
    assert error.value.rule == "S3-OUTSIDE"


def test_an_empty_range_may_lie_anywhere():
    small(Ranges(np.array([5000]), np.array([-3])))


def test_row_ids_are_absolute_where_the_start_was_dropped():
    """The id below the first given row is refused, also when the array would have a row there."""
    inputs = shared(np.random.default_rng(0))
    near = inputs.families[1]
    zero = np.zeros(3, np.int64)
    with pytest.raises(InvalidCall) as error:
        replace(inputs, families=(inputs.families[0], replace(near, selection=Ranges(zero, zero + 128))))
    assert error.value.rule == "S3-OUTSIDE"


def test_the_same_row_in_both_families_counts_twice():
    inputs = gqa(np.random.default_rng(0))
    both = replace(inputs, families=inputs.families * 2, sink=None)
    once, twice = attention(replace(inputs, sink=None)), attention(both)

    # Every sum doubles, which is exact: the same output, ln 2 more in LSE.
    np.testing.assert_array_equal(once.out, twice.out)
    more = twice.lse.view(np.float32) - once.lse.view(np.float32)
    np.testing.assert_allclose(more, np.log(2), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda i: {"q": i.q.astype(np.int16)}, "S2-DTYPE"),
        (lambda i: {"dtype": DType.FLOAT32}, "S2-DTYPE"),
        (lambda i: {"dtype": DType.FLOAT8_E4M3FN}, "S2-DTYPE"),
        (lambda i: {"q": i.q[0]}, "S2-SHAPE"),
        (lambda i: {"q": i.q[:, :, :5]}, "S2-SHAPE"),
        (lambda i: {"q": i.q[:, :5]}, "S2-HEADS"),
        (lambda i: {"sink": i.sink[:2]}, "S2-SHAPE"),
        (lambda i: {"request": i.request + 1}, "S2-REQUEST"),
        (lambda i: {"request": i.request - 1}, "S2-REQUEST"),
        (lambda i: {"scale_bits": -1}, "S2-SCALE"),
        (lambda i: {"families": ()}, "S3-FAMILIES"),
        (lambda i: {"families": i.families * 3}, "S3-FAMILIES"),
        (lambda i: {"families": (replace(i.families[0], first=(-1,)),)}, "S3-OUTSIDE"),
        (lambda i: {"families": (replace(i.families[0], first=()),)}, "S2-REQUEST"),
        (lambda i: {"families": (replace(i.families[0], keys=(), values=(), first=()),)}, "S2-REQUEST"),
        (
            lambda i: {"families": (replace(i.families[0], values=(i.families[0].values[0][:9],)),)},
            "S2-SHAPE",
        ),
        (lambda i: {"families": (replace(i.families[0], selection=lists([np.arange(3)])),)}, "S2-SHAPE"),
        (
            lambda i: {
                "families": (replace(i.families[0], selection=Lists(np.arange(3), np.arange(10) % 9)),)
            },
            "S3-OFFSETS",
        ),
    ],
)
def test_a_malformed_launch_is_refused_by_rule(change: Any, rule: str):
    inputs = gqa(np.random.default_rng(0))
    with pytest.raises(InvalidCall) as error:
        replace(
            inputs,
            sink=change(inputs).get("sink"),
            **{k: v for k, v in change(inputs).items() if k != "sink"},
        )
    assert error.value.rule == rule


def test_shared_values_stay_shared():
    """Keys that are values are held once, also after they were made contiguous."""
    wide = bf16(np.random.default_rng(0), (20, 1, 16))[:, :, ::2]
    inputs = small(lists([np.arange(3)]))
    family = replace(inputs.families[0], keys=(wide,), values=(wide,))
    held = replace(inputs, families=(family,)).families[0]
    assert held.keys[0] is held.values[0]
    assert held.keys[0].flags.c_contiguous
