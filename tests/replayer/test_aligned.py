"""Answers find their rows by identity, in whatever order and company they come."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracekit.model import Bits, DType, ExecutedIdentity, RequestKey, Rows
from tracekit.replayer.messages import Answered

KEYS = tuple(RequestKey.of_prompt([number]) for number in range(3))
IDENTITIES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2**62)), min_size=1, max_size=8, unique=True
)


def rows_of(identities: list[tuple[int, int]]) -> Rows:
    request, positions = np.array(identities, np.int64).T
    return Rows(KEYS, request, positions, np.zeros(len(identities)))


def answered(rows: Rows) -> Answered:
    out = Bits(np.arange(rows.count, dtype=np.uint32)[:, None, None], DType.FLOAT32)
    return Answered(KEYS, rows.request, rows.positions, out, None, ExecutedIdentity("k", {}))


@given(IDENTITIES)
def test_answers_as_they_stand_are_those_of_the_rows_in_order(identities: list[tuple[int, int]]) -> None:
    rows = rows_of(identities)
    places, found = answered(rows).aligned(rows)
    assert places.tolist() == found.tolist() == list(range(rows.count))
    assert places.dtype == found.dtype == np.int64


@given(IDENTITIES, st.randoms(use_true_random=False))
def test_answers_in_another_order_find_their_rows(identities: list[tuple[int, int]], random: object) -> None:
    shuffled = list(identities)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    places, found = answered(rows_of(shuffled)).aligned(rows_of(identities))
    assert found.tolist() == list(range(len(identities)))
    assert [shuffled[place] for place in places] == identities


@given(IDENTITIES)
def test_a_request_of_another_name_at_the_same_places_is_no_answer(identities: list[tuple[int, int]]) -> None:
    rows = rows_of(identities)
    others = tuple(RequestKey(key.digest, 1) for key in KEYS)
    places, found = replace(answered(rows), requests=others).aligned(rows)
    assert places.size == found.size == 0


@given(IDENTITIES)
def test_a_row_at_another_position_is_left_out(identities: list[tuple[int, int]]) -> None:
    rows = rows_of(identities)
    moved = rows.positions.copy()
    moved[0] = 2**62 + 1
    places, found = replace(answered(rows), positions=moved).aligned(rows)
    assert places.tolist() == found.tolist() == list(range(1, rows.count))


@given(IDENTITIES)
def test_a_row_that_is_answered_twice_hides_no_other(identities: list[tuple[int, int]]) -> None:
    rows = rows_of(identities)
    twice = answered(rows_of([*identities]))
    twice = replace(
        twice,
        request=np.append(twice.request, twice.request[:1]),
        positions=np.append(twice.positions, twice.positions[:1]),
    )
    places, found = twice.aligned(rows)
    assert sorted(places.tolist()) == list(range(rows.count + 1))
    assert found.tolist() == sorted([0, *range(rows.count)])
