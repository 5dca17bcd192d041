"""Filters of requests and rows, and budgets, reach the launches of indexers."""

import numpy as np
import pytest

from tracekit.model import Bits, DType, ExecutedIdentity, KVFamily, Lists, Provenance
from tracekit.recorder.filters import parse_filters
from tracekit.recorder.observation import Borrowed, IndexerObservation, SeenKV
from tracekit.recorder.session import Session

ROWS = 5


def bits(shape, start):
    return Bits(np.arange(start, start + np.prod(shape), dtype=np.uint16).reshape(shape), DType.BFLOAT16)


def observed(session, aliases=("a", "b")):
    """A launch over 3 rows of the first request and 2 of the second, each of which chose one key a row."""
    handles = [session.requests.open(alias) for alias in aliases]
    tokens = {handles[0]: np.array([5, 6, 7]), handles[1]: np.array([8, 9])}
    session.begin(tokens)
    chosen = Lists.of([np.arange(position + 1) for position in (0, 1, 2, 0, 1)])
    return IndexerObservation(
        layer=0,
        requests=tuple(handles),
        request=np.array([0, 0, 0, 1, 1], np.int32),
        positions=np.array([0, 1, 2, 0, 1]),
        query=bits((ROWS, 2, 4), 0),
        weights=bits((ROWS, 2), 100),
        keys={
            handle: SeenKV(Borrowed(bits((1, len(new), 4), 200).data, DType.BFLOAT16), None)
            for handle, new in tokens.items()
        },
        top_k=chosen,
        scores=Bits(np.arange(chosen.ids.size, dtype=np.uint32), DType.FLOAT32),
        k=3,
        family=KVFamily.DENSE,
        scale_bits=0x3F800000,
        provenance=Provenance("test", "test", ExecutedIdentity("test", "1"), 1, {}),
    )


def kept(**filters):
    session = Session(parse_filters(**filters))
    session.observe_indexer(observed(session))
    session.end()
    session.requests.resolve()
    return [call for _, call in session._held.indexer_calls()]


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"include": ["a"]}, [0, 1, 2]),
        ({"exclude": ["a"]}, [3, 4]),
        ({"rows": [1, 2]}, [1, 2, 4]),
        ({"rows": [1, 2], "include": ["b"]}, [4]),
        ({"rows": [2], "include": ["b"]}, None),
        ({"include": ["c"]}, None),
        ({"layers": [1]}, None),
    ],
)
def test_what_is_kept_of_a_launch(filters, wanted):
    calls = kept(**filters)
    if wanted is None:
        assert calls == []
        return
    (whole,), (call,) = kept(), calls
    same = whole.take(np.array(wanted))
    assert call.rows.ids == same.rows.ids
    assert call.query.same(same.query)
    assert call.weights.same(same.weights)
    assert call.scores.same(same.scores)
    assert (call.top_k.ids.tolist(), call.top_k.offsets.tolist()) == (
        same.top_k.ids.tolist(),
        same.top_k.offsets.tolist(),
    )
    assert call.keys.keys() == same.keys.keys()


def test_a_launch_that_would_pass_the_budget_ends_the_recording():
    session = Session(budget=100)
    session.observe_indexer(observed(session))
    assert session.captured == 0
    assert not session.wants(0)
    session.end()
    assert session.problems[0].startswith("step 0: the budget of 100 bytes is used up")
