"""Traces whose numbers are allowed but odd: an honest kernel is not refuted for them."""

from dataclasses import replace

import numpy as np
import pytest

from tracekit.model import RequestKey, Rows
from tracekit.providers.base import Launch
from tracekit.providers.registry import create
from tracekit.relations.arrange import foreign
from tracekit.replayer import replay
from tracekit.replayer.messages import gather
from tracekit.testing import MemoryTrace, dense_call
from tracekit.verdict import Status


def with_ordinals(*ordinals):
    """A call whose requests all have one prompt."""
    call = dense_call(lengths=(6, 4), seed=1)
    keys = tuple(RequestKey("0123456789abcdef", ordinal) for ordinal in ordinals)
    rows = Rows(keys, call.rows.request, call.rows.positions, call.rows.token_ids)
    kv = dict(zip(keys, call.kv.values(), strict=True))
    return replace(call, rows=rows, kv=kv)


@pytest.mark.parametrize("ordinals", [(0, 1_000_000), (0, 1), (2, 5), (3, 2_000_000)])
def test_companions_are_other_requests_whatever_the_ordinals(ordinals):
    call = with_ordinals(*ordinals)
    keys = set(call.rows.requests)
    for number in range(4):
        others = set(foreign(call, number).rows.requests)
        assert len(others) == len(call.rows.requests)
        assert not others & keys
        keys |= others

    report = replay([MemoryTrace((call,))], providers=["tka1"], claims=["rerun", "subbatch"])

    assert {verdict.status for verdict in report.verdicts} == {Status.HELD}


def test_answers_find_their_rows_at_positions_near_the_end_of_the_integers():
    call = dense_call(lengths=(3, 3), new=(1, 1), seed=1)
    positions = np.array([0, 1 << 62], np.int64)
    rows = Rows(call.rows.requests, call.rows.request, positions, call.rows.token_ids)
    answered = gather(Launch((call,)), create("oracle").run(Launch((call,))))
    shuffled = replace(answered, request=answered.request[::-1].copy(), positions=positions[::-1].copy())

    places, found = shuffled.aligned(rows)

    assert (places.tolist(), found.tolist()) == ([1, 0], [0, 1])


def test_answers_of_many_requests_at_large_positions_are_not_confused():
    lengths = (2,) * 5
    call = dense_call(lengths=lengths, new=(1,) * 5, seed=1)
    positions = np.full(5, (1 << 62) - 1, np.int64)
    rows = Rows(call.rows.requests, call.rows.request, positions, call.rows.token_ids)
    answered = gather(Launch((call,)), create("oracle").run(Launch((call,))))

    places, found = replace(answered, positions=positions).aligned(rows)

    assert (places.tolist(), found.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
