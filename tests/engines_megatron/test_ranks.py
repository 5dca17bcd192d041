"""Two tensor parallel ranks over gloo: each process records its own heads, and they are those of one."""

import numpy as np
import pytest
import torch

import tracekit
from tests.engines_megatron.conftest import dense, padded, run_ranks
from tracekit.canonical.heads import HeadShards
from tracekit.cli.main import run
from tracekit.engines import megatron_tiny as tiny

RANKS = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """A model's weights, and the traces of two processes that share them."""
    folder = tmp_path_factory.mktemp("ranks")
    model = tiny.gpt(softmax_type="learnable")
    torch.save(dict(model.named_parameters()), folder / "weights.pt")
    return model, run_ranks(folder)


def test_each_rank_says_which_part_of_the_job_it_is(ranks):
    for rank, path in enumerate(ranks[1]):
        assert tracekit.verify(path) == []
        with tracekit.open(path) as trace:
            share, call = trace.recording.share, trace.call(0)
        assert (share.rank, share.world, share.tensor, share.tensor_size) == (rank, RANKS, rank, RANKS)
        assert (share.data, share.data_size, share.kv_heads) == (0, 1, 2)
        assert call.rank == rank
        assert (call.num_heads, call.num_kv_heads) == (2, 1)


def test_the_heads_of_both_are_those_of_one(ranks, recorded):
    """The first layer, bit for bit: behind it the ranks have added up their parts in another order."""
    model, paths = ranks
    whole = recorded(model, padded(12, 5).train).calls[0]
    parts = []
    for path in paths:
        with tracekit.open(path) as trace:
            parts.append(trace.call(0))
    shards = HeadShards(4, 2, RANKS)
    assert all(part.rows.ids == whole.rows.ids for part in parts)
    for name, take in (("q", lambda c: c.q.data), ("out", lambda c: c.out.bits.data)):
        assert np.array_equal(shards.unshard_query([take(part) for part in parts]), take(whole)), name
    for request in range(2):
        held, own = [dense(part, request) for part in parts], dense(whole, request)
        assert np.array_equal(shards.unshard_kv([rows.keys.data for rows in held]), own.keys.data)
        assert np.array_equal(shards.unshard_kv([rows.values.data for rows in held]), own.values.data)
    sinks = np.concatenate([part.sink.data for part in parts])
    assert np.array_equal(sinks, whole.sink.data)
    assert all(part.grads.d_q.shape == part.q.shape for part in parts)


def test_the_trace_of_a_rank_is_replayed_alone(ranks):
    report = tracekit.replay(ranks[1][1], provider="megatron", claims="recorded")
    assert report.exit_code == 0
    assert report.find("recorded", "megatron").status is tracekit.Status.HELD


def test_the_traces_of_both_are_merged_into_one(ranks, recorded, tmp_path):
    """Heads, sinks and gradients; only what layers behind the first have added up may differ."""
    model, paths = ranks
    whole = recorded(model, padded(12, 5).train).calls[0]
    assert run(["merge", *map(str, paths), "--output", str(tmp_path / "job.h5")]) == 0
    assert tracekit.verify(tmp_path / "job.h5") == []
    with tracekit.open(tmp_path / "job.h5") as trace:
        assert len(trace) == 2
        call = trace.call(0)
    assert call.q.same(whole.q)
    assert call.out.bits.same(whole.out.bits)
    assert call.sink.same(whole.sink)
    assert dense(call).keys.same(dense(whole).keys)
    assert call.grads.d_out.shape == whole.grads.d_out.shape
    assert call.grads.d_sink.shape == (4,)
