"""Recording a model that keeps its own kernels: what stands in the calls is what the model computed."""

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from tracekit.compare import Roundings, compare_envelope, envelope
from tracekit.engines.driver import cache_argument, greedy
from tracekit.model import DType, KVFamily, KVSource, Mode, Origin, Ranges
from tracekit.recorder.api import record

DENSE = KVFamily.DENSE


def bits(tensor):
    return tensor.detach().contiguous().view(torch.int16).numpy().view(np.uint16)


def spy_on_layer_0(model, store):
    """Take layer 0's own arguments where the model hands them to its attention function."""
    attention = model.model.layers[0].self_attn
    functions = {"sdpa": AttentionInterface._global_mapping["sdpa"]}

    def spy(module, q, k, v, mask, **kwargs):
        answer = functions["sdpa"](module, q, k, v, mask, **kwargs)
        if module is attention:
            store.append((q.clone(), k.clone(), v.clone(), answer[0].clone()))
        return answer

    return spy


def test_q_keys_values_and_out_are_the_engines_own_bits(qwen3, recorded, prompt, monkeypatch):
    seen = []
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", spy_on_layer_0(qwen3, seen))
    got = recorded(qwen3, lambda m: greedy(m, [prompt(20)], 4))

    assert len(seen) == 4
    for step, (q, k, v, out) in enumerate(seen):
        call = got.at(layer=0, step=step)
        (rows,) = (families[DENSE] for families in call.kv.values())
        assert np.array_equal(call.q.data, bits(q[0].transpose(0, 1)))
        assert np.array_equal(rows.keys.data, bits(k[0].transpose(0, 1)))
        assert np.array_equal(rows.values.data, bits(v[0].transpose(0, 1)))
        assert np.array_equal(call.out.bits.data, bits(out[0]))


def test_q_is_after_norm_and_rope(qwen3, recorded, prompt):
    """Computed again from the module's own layers: q_norm, k_norm, then the rotation."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    taken = {}
    attention = qwen3.model.layers[0].self_attn
    hook = attention.register_forward_pre_hook(lambda m, a, k: taken.update(k), with_kwargs=True)
    call = recorded(qwen3, lambda m: greedy(m, [prompt(20)], 1)).at(layer=0, step=0)
    hook.remove()

    hidden = taken["hidden_states"]
    shape = (*hidden.shape[:-1], -1, attention.head_dim)
    with torch.no_grad():
        q = attention.q_norm(attention.q_proj(hidden).view(shape)).transpose(1, 2)
        k = attention.k_norm(attention.k_proj(hidden).view(shape)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *taken["position_embeddings"])
    assert np.array_equal(call.q.data, bits(q[0].transpose(0, 1)))


@pytest.mark.parametrize(("name", "kernel"), [("qwen3", "sdpa"), ("qwen3", "eager"), ("gpt_oss", "eager")])
def test_tokens_are_the_same_with_recording_on(name, kernel, request, recorded, prompt):
    model = request.getfixturevalue(name)
    model.set_attn_implementation(kernel)
    prompts = [prompt(7, 1), prompt(21, 2)]
    tokens = []
    got = recorded(model, lambda m: tokens.append(greedy(m, prompts, 6)))

    assert tokens == [greedy(model, prompts, 6)]
    assert all(line.complete for line in got.recording.ledger)
    assert got.session.problems == []


def test_generate_of_transformers_is_recorded_too(qwen3, recorded, prompt):
    ids = torch.tensor([prompt(12)])
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = []
    got = recorded(qwen3, lambda m: tokens.append(m.generate(ids, **options)))

    assert torch.equal(tokens[0], qwen3.generate(ids, **options))
    (request,) = got.recording.requests
    assert request.token_ids.tolist() == tokens[0][0, :-1].tolist()
    assert request.prompt_length == 12
    assert [line.recorded for line in got.recording.ledger] == [2, 2, 2, 2]


def test_off_means_off(qwen3, recorded, prompt):
    table, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before, masks_before = dict(table), dict(masks)
    modules = [qwen3, *(layer.self_attn for layer in qwen3.model.layers)]
    recorded(qwen3, lambda m: greedy(m, [prompt(5)], 2))

    assert table.keys() == before.keys()
    assert all(table[name] is before[name] for name in before)
    assert all(masks[name] is masks_before[name] for name in masks_before)
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in modules)


def test_off_means_off_after_an_error(qwen3):
    before = AttentionInterface._global_mapping["sdpa"]
    with (
        pytest.raises(RuntimeError, match="mine"),
        record("unused.h5", engine="transformers", model=qwen3, write=lambda *_: None),
    ):
        raise RuntimeError("mine")

    assert AttentionInterface._global_mapping["sdpa"] is before
    assert not qwen3._forward_pre_hooks


@pytest.mark.parametrize(("name", "kernel"), [("qwen3", "sdpa"), ("qwen3", "eager"), ("gpt_oss", "eager")])
def test_out_lies_near_a_binary64_recomputation(name, kernel, request, recorded, prompt):
    """A wrong row, mask, sink or scale moves O by far more than the roundings that the call declares."""
    model = request.getfixturevalue(name)
    model.set_attn_implementation(kernel)
    for call in recorded(model, lambda m: greedy(m, [prompt(9, 1), prompt(25, 2)], 4)).calls:
        declared = Roundings(call.conventions.score_dtype, call.conventions.probability_dtype)
        found = compare_envelope(call, envelope(call, declared), call.out.bits, None)
        assert found.outside.first is None, (call.layer, call.step)
        assert found.skipped == 0


def test_left_padding_leaves_no_trace_in_identity(qwen3, recorded, prompt):
    """A sequence has the same rows, positions, tokens and selection alone and padded beside a longer one."""
    short, long = prompt(6, 1), prompt(19, 2)
    alone = recorded(qwen3, lambda m: greedy(m, [short], 1)).at(layer=0, step=0)
    padded = recorded(qwen3, lambda m: greedy(m, [short, long], 1)).at(layer=0, step=0)

    key = alone.rows.requests[0]
    assert padded.rows.requests[0] == key
    assert padded.num_rows == 25
    mine = padded.take(np.flatnonzero(padded.rows.request == 0))
    assert mine.rows.ids == alone.rows.ids
    assert mine.rows.token_ids.tolist() == short
    assert np.array_equal(mine.selection.families[DENSE].lo, alone.selection.families[DENSE].lo)
    assert np.array_equal(mine.selection.families[DENSE].hi, alone.selection.families[DENSE].hi)
    assert mine.kv[key][DENSE].count == alone.kv[key][DENSE].count == 6
    assert mine.kv[key][DENSE].values.same(alone.kv[key][DENSE].values)
    assert padded.launch.row_slots[:6].tolist() == list(range(13, 19))


def test_equal_prompts_get_ordinals(qwen3, recorded, prompt):
    same = prompt(8)
    call = recorded(qwen3, lambda m: greedy(m, [same, same], 1)).at(layer=0, step=0)

    assert [key.ordinal for key in call.rows.requests] == [0, 1]
    assert len({key.digest for key in call.rows.requests}) == 1


def test_a_window_forgets_its_start(gpt_oss, recorded, prompt):
    """gpt-oss layer 0 reads 16 tokens; its cache keeps 15 rows, so the rows of a decode begin later."""
    got = recorded(gpt_oss, lambda m: greedy(m, [prompt(12, 1), prompt(30, 2)], 4))
    prefill, decode = got.at(layer=0, step=0), got.at(layer=0, step=3)

    part = prefill.selection.families[DENSE]
    positions = prefill.rows.positions
    assert isinstance(part, Ranges)
    assert np.array_equal(part.lo, np.maximum(positions - 15, 0))
    assert np.array_equal(part.hi, positions + 1)
    assert decode.mode is Mode.DECODE
    assert decode.conventions.window == 16
    held = [decode.kv[key][DENSE] for key in decode.rows.requests]
    assert [rows.first for rows in held] == [0, 17]
    assert [rows.end for rows in held] == [15, 33]
    assert decode.selection.families[DENSE].lo.tolist() == [0, 17]
    assert got.at(layer=1, step=3).kv[decode.rows.requests[1]][DENSE].first == 0


def test_sinks_are_recorded_in_binary32(gpt_oss, recorded, prompt):
    call = recorded(gpt_oss, lambda m: greedy(m, [prompt(5)], 1)).at(layer=1, step=0)
    sinks = gpt_oss.model.layers[1].self_attn.sinks

    assert call.sink.dtype is DType.FLOAT32
    assert np.array_equal(call.sink.data.view(np.float32), sinks.detach().float().numpy())


def test_kv_rows_are_held_once(qwen3, recorded, prompt):
    """The calls of a decode are views of one log."""
    got = recorded(qwen3, lambda m: greedy(m, [prompt(10)], 5))
    held = [next(iter(got.at(layer=1, step=s).kv.values()))[DENSE] for s in range(5)]

    assert [rows.count for rows in held] == [10, 11, 12, 13, 14]
    assert all(np.shares_memory(held[0].keys.data, rows.keys.data) for rows in held)


def test_filters_count_what_they_leave_out(qwen3, recorded, prompt):
    got = recorded(qwen3, lambda m: greedy(m, [prompt(5)], 3), layers=[1], steps=[0, 2])

    assert [(call.step, call.layer) for call in got.calls] == [(0, 1), (2, 1)]
    assert [(x.expected, x.fired, x.recorded, x.filtered) for x in got.recording.ledger] == [
        (2, 2, 1, 1),
        (2, 2, 0, 2),
        (2, 2, 1, 1),
    ]
    assert all(line.complete for line in got.recording.ledger)


def test_a_prefill_in_chunks_is_one_prompt(qwen3, recorded, prompt):
    """Two forwards of several tokens, then a decode: one request, whose prompt is both chunks."""
    ids = prompt(13)

    def run(model):
        with torch.no_grad():
            cache = model(torch.tensor([ids[:8]]), use_cache=True).past_key_values
            for chunk in (ids[8:], [7]):
                model(torch.tensor([chunk]), **{cache_argument(model): cache})

    got = recorded(qwen3, run)
    (request,) = got.recording.requests
    assert request.token_ids.tolist() == [*ids, 7]
    assert request.prompt_length == 13
    assert [got.at(layer=0, step=s).mode for s in range(3)] == [Mode.PREFILL, Mode.PREFILL, Mode.DECODE]
    second = got.at(layer=0, step=1)
    assert second.rows.positions.tolist() == list(range(8, 13))
    assert second.selection.families[DENSE].hi.tolist() == list(range(9, 14))


def test_forced_tokens_are_what_is_fed(qwen3, recorded, prompt):
    got = recorded(qwen3, lambda m: greedy(m, [prompt(5)], 4, forced=[[9, 8, 7, 6]]))
    assert got.recording.requests[0].token_ids.tolist() == [*prompt(5), 9, 8, 7]


def test_training_is_its_own_mode(qwen3, recorded, prompt):
    qwen3.train()
    try:
        got = recorded(qwen3, lambda m: m(torch.tensor([prompt(6)]), use_cache=False))
    finally:
        qwen3.eval()
    assert {call.mode for call in got.calls} == {Mode.TRAINING}
    assert got.calls[0].launch.scalars["grad"]


def test_lse_is_derived_and_says_so(qwen3, recorded, prompt):
    call = recorded(qwen3, lambda m: greedy(m, [prompt(5)], 1)).at(layer=0, step=0)

    assert call.lse.origin is Origin.DERIVED
    assert call.out.origin is Origin.EXECUTED
    assert call.conventions.kv_source is KVSource.CONSUMED


def test_identity_names_weights_and_not_the_kernel(qwen3, recorded, prompt):
    digests = set()
    for kernel in ("sdpa", "eager"):
        qwen3.set_attn_implementation(kernel)
        got = recorded(qwen3, lambda m: greedy(m, [prompt(5)], 1))
        digests.add((got.recording.identity.weights_digest, got.recording.identity.config_digest))
        assert got.calls[0].provenance.executed.kernel == f"transformers.{kernel}"
    assert len(digests) == 1
