"""Calls of indexers in a trace: every field comes back, keys are held once, the digest covers them."""

from dataclasses import replace

import h5py
import numpy as np
import pytest

from tests.store.calls import KEYS, bits, indexer_call, prefill, recording
from tracekit.errors import UsageError
from tracekit.model import Bits, Lists
from tracekit.store import open_trace, verify_trace, write_trace


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.h5"


def write(path, *indexers, calls=None):
    return write_trace(path, recording(), calls or [prefill()], indexer_calls=indexers)


def digest(path, *indexers, calls=None):
    return write(path, *indexers, calls=calls).content_digest


def test_every_field_comes_back(path):
    written = [indexer_call(), replace(indexer_call(1, start=10), scores=None, step=8)]
    summary = write(path, *written)

    assert summary.indexer_calls == 2
    assert verify_trace(path) == []
    with open_trace(path) as trace:
        read = list(trace.indexer_calls())
        assert len(trace) == 1
        for call, back, head in zip(written, read, trace.indexer_heads, strict=True):
            for name in ("layer", "step", "rank", "k", "family", "scale_bits", "provenance"):
                assert getattr(back, name) == getattr(call, name)
            assert back.rows.ids == call.rows.ids
            assert back.query.same(call.query)
            assert back.weights.same(call.weights)
            assert back.keys[KEYS[1]].same(call.keys[KEYS[1]])
            assert back.top_k.ids.tolist() == call.top_k.ids.tolist()
            assert back.top_k.offsets.tolist() == call.top_k.offsets.tolist()
            assert (back.scores is None) == (call.scores is None)
            assert call.scores is None or back.scores.same(call.scores)
            assert (head.num_rows, head.num_heads, head.head_dim, head.k) == (4, 3, 8, 2)
            assert head.has_scores is (call.scores is not None)


def test_keys_that_only_grow_are_held_once(path):
    keys = bits(np.random.default_rng(5), (5, 8))
    write(path, *(indexer_call(n, start=4 * n + 3, keys=keys.part(slice(n + 1))) for n in range(1, 4)))

    with h5py.File(path) as file:
        sizes = {name: len(file[f"payload/keys/{name}"]) for name in file["payload/keys"]}
    assert 4 in sizes.values()
    assert sum(sizes.values()) == 8 + 4  # the attention call has 8 rows of another shape


def test_a_trace_without_them_has_no_table(path):
    write(path)
    with h5py.File(path) as file:
        assert "indexer_calls" not in file["index"]
    with open_trace(path) as trace:
        assert trace.indexer_heads == ()
        with pytest.raises(UsageError, match="no indexer call 0; it holds none"):
            trace.indexer_call(0)


@pytest.mark.parametrize("field", ["query", "weights", "scores", "keys", "order", "k", "scale_bits"])
def test_any_change_moves_the_content_digest(path, field):
    call = indexer_call()

    def flipped(held: Bits) -> Bits:
        data = held.data.copy()
        data.reshape(-1)[-1] ^= 1
        return Bits(data, held.dtype)

    match field:
        case "keys":
            changed = replace(call, keys={KEYS[1]: flipped(call.keys[KEYS[1]])})
        case "order":
            lists = [call.top_k.row(t)[::-1] for t in range(4)]
            changed = replace(call, top_k=Lists.of(lists))
        case "k" | "scale_bits":
            changed = replace(call, **{field: getattr(call, field) + 1})
        case _:
            changed = replace(call, **{field: flipped(getattr(call, field))})

    assert digest(path, call) != digest(path, changed)
    assert digest(path, call) != digest(path)


def test_how_rows_are_cut_into_calls_and_ordered_does_not(path):
    call = indexer_call()
    halves = [call.take(np.array([3, 2])), call.take(np.array([0, 1]))]

    assert digest(path, call) == digest(path, *halves)
