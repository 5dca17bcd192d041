"""What the sparse indexers of DeepSeek-V3.2 and V4 multiplied and chose, as recorded."""

import numpy as np
import pytest
import torch

from tracekit.engines import transformers as engine
from tracekit.engines.driver import greedy
from tracekit.model import KVFamily
from tracekit.providers.indexers import IndexerLaunch
from tracekit.providers.transformers_indexer import TransformersIndexer
from tracekit.recorder.api import CaptureIncomplete

FORCED = [[9, 8, 7, 6]]
MODELS = {"deepseek_v4": KVFamily.C4, "deepseek_v32": KVFamily.DENSE}


@pytest.fixture(params=MODELS)
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def got(model, recorded, prompt):
    return recorded(model, lambda m: greedy(m, [prompt(41)], 4, forced=FORCED))


def test_there_is_one_call_a_step_and_sparse_layer(got, model):
    layers = [1] if model.config.model_type == "deepseek_v4" else [0, 1]
    family = MODELS[model.config.model_type]

    assert [(c.step, c.layer) for c in got.indexer_calls] == [(s, n) for s in range(4) for n in layers]
    assert {call.family for call in got.indexer_calls} == {family}
    assert {call.k for call in got.indexer_calls} == {8}
    assert [c.num_rows for c in got.indexer_calls][:: len(layers)] == [41, 1, 1, 1]


def test_the_attention_read_what_the_indexer_chose(got):
    for call in got.indexer_calls:
        attention = got.at(layer=call.layer, step=call.step)
        part = attention.selection.families[call.family]
        assert attention.rows.ids == call.rows.ids
        for t in range(call.num_rows):
            assert part.row(t).tolist() == sorted(call.top_k.row(t).tolist())
            assert call.top_k.row(t).size == min(int(call.visible[t]), 8)


def test_the_scores_are_those_of_the_formula(got):
    """In binary64 from the recorded query, weights and keys; FP32 products leave a small difference."""
    for call in got.indexer_calls:
        scale = np.uint32(call.scale_bits).view(np.float32).astype(np.float64)
        keys = {key: bits.to_float64() for key, bits in call.keys.items()}
        at = 0
        for t, row in enumerate(call.rows.ids):
            chosen = call.top_k.row(t)
            products = scale * (call.query.part(t).to_float64() @ keys[row.request][chosen].T)
            exact = call.weights.part(t).to_float64() @ np.maximum(products, 0)
            size = np.abs(call.weights.part(t).to_float64()) @ np.abs(products)
            given = call.scores.part(slice(at, at + chosen.size)).to_float64()
            assert (np.abs(given - exact) <= 64 * 2.0**-24 * size + 1e-30).all()
            assert (np.diff(given) <= 0).all()
            at += chosen.size


def test_the_indexer_run_again_chooses_and_scores_the_same_bits(got):
    provider = TransformersIndexer()
    for call in got.indexer_calls:
        answer = provider.run(IndexerLaunch((call,)))
        assert answer.executed == call.provenance.executed
        assert answer.chosen[0].top_k.ids.tolist() == call.top_k.ids.tolist()
        assert answer.chosen[0].top_k.offsets.tolist() == call.top_k.offsets.tolist()
        assert answer.chosen[0].scores.same(call.scores)


def test_index_keys_are_held_once_and_as_narrow_as_they_were(got):
    last = got.indexer_calls[-1]
    (keys,) = last.keys.values()
    assert keys.dtype == last.query.dtype == "bfloat16"
    assert keys.shape[0] == (11 if last.family is KVFamily.C4 else 44)


def test_filtered_layers_have_no_indexer_calls(model, recorded, prompt):
    got = recorded(model, lambda m: greedy(m, [prompt(9)], 1), layers=[1], steps=[0])
    assert [call.layer for call in got.indexer_calls] == [1]


def test_a_failing_look_at_an_indexer_is_told_and_disturbs_nothing(model, recorded, prompt, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("of the hook")

    tokens = greedy(model, [prompt(9)], 3)
    monkeypatch.setattr(engine, "observe_indexer", broken)
    seen = []
    with pytest.warns(CaptureIncomplete, match=r"indexer of layer \d: ZeroDivisionError"):
        got = recorded(model, lambda m: seen.append(greedy(m, [prompt(9)], 3)))

    assert seen == [tokens]
    assert got.indexer_calls == []
    assert len(got.calls) == 3 * len(model.model.layers)
    assert not any(line.complete for line in got.recording.ledger)


def test_an_indexer_of_another_make_is_told_and_disturbs_nothing(deepseek_v32, recorded, prompt, monkeypatch):
    def unknown(_):
        raise AttributeError("no weights_proj")

    monkeypatch.setattr(engine, "describe", unknown)
    with pytest.warns(CaptureIncomplete, match="indexer of layer 0: AttributeError"):
        got = recorded(deepseek_v32, lambda m: greedy(m, [prompt(9)], 1))

    assert len(got.calls) == 2
    assert got.indexer_calls == []
    assert not got.recording.ledger[0].complete


def test_an_indexer_that_raises_leaves_no_mode_behind(model, recorded, prompt, monkeypatch):
    layer = model.model.layers[1].self_attn
    indexer = getattr(layer, "indexer", None) or layer.compressor.indexer
    monkeypatch.setattr(indexer, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recorded(model, lambda m: m(torch.tensor([prompt(9)])))

    assert torch.overrides._get_current_function_mode() is None
    assert not indexer._forward_hooks
    assert not indexer._forward_pre_hooks


def test_a_filter_of_rows_leaves_indexer_calls_with_these_rows_alone(model, recorded, prompt):
    some = recorded(model, lambda m: greedy(m, [prompt(11), prompt(11)[::-1]], 4), rows=[4, 7])
    whole = recorded(model, lambda m: greedy(m, [prompt(11), prompt(11)[::-1]], 4))

    assert some.indexer_calls
    assert {int(p) for call in some.indexer_calls for p in call.rows.positions} == {4, 7}
    for call in some.indexer_calls:
        (full,) = (
            c
            for c in whole.indexer_calls
            if (c.layer, c.step, c.family) == (call.layer, call.step, call.family)
        )
        order = [full.rows.ids.index(row) for row in call.rows.ids]
        same = full.take(np.array(order))
        assert call.query.same(same.query)
        assert call.weights.same(same.weights)
        assert call.top_k.ids.tolist() == same.top_k.ids.tolist()
        assert call.scores.same(same.scores)


def test_indexers_count_for_the_budget(model, recorded, prompt):
    def act(m):
        greedy(m, [prompt(9)], 3)

    whole = recorded(model, act)
    with pytest.warns(CaptureIncomplete, match="budget of"):
        part = recorded(model, act, max_size_gb=whole.session.captured / 2e9)

    assert 0 < len(part.indexer_calls) < len(whole.indexer_calls)
    assert part.session.captured < whole.session.captured
    spent = min(line.step for line in part.recording.ledger if line.cut)
    assert max(call.step for call in part.indexer_calls) <= spent
