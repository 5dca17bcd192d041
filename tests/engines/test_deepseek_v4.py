"""DeepSeek-V4: window and compressed rows in one softmax, recorded by family, and re-run."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tracekit.compare import Roundings, compare_envelope, envelope
from tracekit.engines import tiny
from tracekit.engines import transformers as engine
from tracekit.engines.driver import greedy
from tracekit.errors import Unsupported
from tracekit.model import KVFamily, Mode
from tracekit.providers.base import Launch
from tracekit.providers.transformers import Transformers
from tracekit.recorder.api import CaptureIncomplete

RECENT, C4, C128 = KVFamily.RECENT, KVFamily.C4, KVFamily.C128
PROMPT = 125
STEPS = 8
"""Decode crosses position 127, where the first C128 row appears, and 128, where the window drops row 0."""


@pytest.fixture(scope="module")
def forced(prompt):
    return prompt(STEPS, 3)


@pytest.fixture(scope="module")
def got(_models, recorded, prompt, forced):
    """Prefill of 125 tokens and 7 decode steps."""
    model = _models["tiny-deepseek-v4"]
    return recorded(model, lambda m: greedy(m, [prompt(PROMPT)], STEPS, forced=[forced]))


def bits(tensor):
    return tensor.detach().contiguous().view(torch.int16).numpy().view(np.uint16)


def rows_of(call, family):
    (families,) = call.kv.values()
    return families[family]


def test_tokens_are_the_same_with_recording_on(deepseek_v4, recorded, prompt):
    tokens = []
    got = recorded(deepseek_v4, lambda m: tokens.append(greedy(m, [prompt(20, 1)], 6)))

    assert tokens == [greedy(deepseek_v4, [prompt(20, 1)], 6)]
    assert got.session.problems == []
    assert all(line.complete for line in got.recording.ledger)


def test_each_layer_has_its_families_recent_first(got):
    families = [tuple(got.at(layer=layer, step=0).selection.families) for layer in range(3)]

    assert families == [(RECENT,), (RECENT, C4), (RECENT, C128)]
    assert all(rows.shared for call in got.calls for f in call.kv.values() for rows in f.values())
    assert {call.conventions.output_boundary for call in got.calls} == {"before inverse rope"}
    assert {call.conventions.window for call in got.calls} == {128}
    assert all(call.conventions.causal for call in got.calls)


def test_the_rows_are_those_that_the_kernel_read(deepseek_v4, recorded, prompt, forced, monkeypatch):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as model_file

    seen = []
    eager = model_file.eager_attention_forward

    def spy(module, q, k, v, mask, **kwargs):
        answer = eager(module, q, k, v, mask, **kwargs)
        seen.append((q.clone(), k.clone(), mask.clone(), answer[0].clone()))
        return answer

    monkeypatch.setattr(model_file, "eager_attention_forward", spy)
    got = recorded(deepseek_v4, lambda m: greedy(m, [prompt(PROMPT)], STEPS, forced=[forced]))

    assert len(seen) == len(got.calls) == 3 * STEPS
    for call, (q, k, mask, out) in zip(got.calls, seen, strict=True):
        rows = [rows_of(call, family) for family in call.selection.families]
        assert np.array_equal(call.q.data, bits(q[0].transpose(0, 1)))
        assert np.array_equal(np.concatenate([r.keys.data for r in rows]), bits(k[0].transpose(0, 1)))
        assert np.array_equal(call.out.bits.data, bits(out[0]))
        shown = (mask[0, 0] == 0).numpy()
        for t in range(call.num_rows):
            held = rows[0].count
            read = dict(call.selection.row(t))
            assert (read[RECENT] - rows[0].first).tolist() == np.flatnonzero(shown[t, :held]).tolist()
            if len(rows) > 1:
                (family,) = set(read) - {RECENT}
                assert read[family].tolist() == np.flatnonzero(shown[t, held:]).tolist()


def test_what_a_row_may_read_changes_at_the_boundaries(deepseek_v4, recorded, prompt):
    """2/3: the first C4 row. 127: the first C128 row. 128: the window drops row 0."""
    got = recorded(deepseek_v4, lambda m: greedy(m, [prompt(130)], 1))
    recent, c4, c128 = (
        got.at(layer=layer, step=0).selection.families[family]
        for layer, family in ((0, RECENT), (1, C4), (2, C128))
    )
    assert [c4.row(t).tolist() for t in (2, 3, 6, 7)] == [[], [0], [0], [0, 1]]
    assert [c128.row(t).tolist() for t in (126, 127, 129)] == [[], [0], [0]]
    assert [recent.row(t)[0] for t in (127, 128, 129)] == [0, 1, 2]


def test_decode_has_absolute_rows(got):
    """Steps 1 .. 7 are positions 125 .. 131; compressed rows are held once and only grow."""
    positions = [int(got.at(layer=0, step=step).rows.positions[0]) for step in range(1, STEPS)]
    recent = [rows_of(got.at(layer=0, step=step), RECENT) for step in range(1, STEPS)]
    c4 = [rows_of(got.at(layer=1, step=step), C4) for step in range(STEPS)]
    c128 = [rows_of(got.at(layer=2, step=step), C128).count for step in range(STEPS)]

    assert positions == list(range(125, 132))
    assert {got.at(layer=0, step=step).mode for step in range(1, STEPS)} == {Mode.DECODE}
    assert [rows.end for rows in recent] == [126, 127, 128, 129, 130, 131, 132]
    assert [rows.first for rows in recent] == [0, 0, 0, 1, 2, 3, 4]
    assert [rows.count for rows in c4] == [31, 31, 31, 32, 32, 32, 32, 33]
    assert all(rows.first == 0 and np.shares_memory(rows.keys.data, c4[0].keys.data) for rows in c4)
    assert c128 == [0, 0, 0, 1, 1, 1, 1, 1]


def test_the_recorded_launch_gives_the_recorded_bits(got):
    provider = Transformers()
    for call in got.calls:
        for one in (call, replace(call, launch=None)):
            answer = provider.run(Launch((one,)))
            assert answer.tensors[0].out.same(call.out.bits), (call.layer, call.step)
        assert answer.executed == call.provenance.executed


def test_out_lies_in_its_envelope(got):
    for call in got.calls:
        bound = envelope(call, Roundings(call.conventions.score_dtype, call.conventions.probability_dtype))
        assert compare_envelope(call, bound, call.out.bits, None).outside.first is None


def test_several_requests_of_one_length(deepseek_v4, recorded, prompt):
    got = recorded(deepseek_v4, lambda m: m(torch.tensor([prompt(9, 1), prompt(9, 2)])))

    call = got.at(layer=1, step=0)
    assert [call.kv[key][C4].count for key in call.rows.requests] == [2, 2]
    assert Transformers().run(Launch((call,))).tensors[0].out.same(call.out.bits)


def test_a_short_prompt_has_no_compressed_row_yet(deepseek_v4, recorded, prompt):
    got = recorded(deepseek_v4, lambda m: greedy(m, [prompt(2)], 3, forced=[[9, 8, 7]]))

    assert [rows_of(got.at(layer=1, step=step), C4).count for step in range(3)] == [0, 0, 1]
    assert got.session.problems == []
    for call in got.calls:
        assert Transformers().run(Launch((call,))).tensors[0].out.same(call.out.bits)


def test_a_prefill_in_chunks_without_and_with_a_cache(deepseek_v4, recorded, prompt):
    ids = prompt(150)

    def run(model):
        with torch.no_grad():
            held = model(torch.tensor([ids[:140]]), use_cache=True)
            cache = held.cache if "cache" in held else held.past_key_values
            name = "cache" if "cache" in held else "past_key_values"
            model(torch.tensor([ids[140:]]), **{name: cache})

    got = recorded(deepseek_v4, run)
    second = got.at(layer=1, step=1)
    assert rows_of(second, RECENT).first == 13
    assert rows_of(second, C4).count == 37
    assert second.rows.positions.tolist() == list(range(140, 150))
    assert Transformers().run(Launch((second,))).tensors[0].out.same(second.out.bits)


def test_a_padded_batch_is_refused_by_layer(deepseek_v4, recorded, prompt):
    with pytest.warns(CaptureIncomplete, match="compressed rows then mix padding"):
        got = recorded(deepseek_v4, lambda m: greedy(m, [prompt(9, 1), prompt(5, 2)], 1))

    assert [call.layer for call in got.calls] == [0]
    assert not got.recording.ledger[0].complete
    assert got.indexer_calls == []


def test_other_compress_rates_are_refused_before_anything_is_touched():
    config = tiny.CONFIGS["tiny-deepseek-v4"]()
    config.compress_rates["heavily_compressed_attention"] = 16
    model = torch.nn.Module()
    model.config = config
    with pytest.raises(Unsupported, match="one row of 16 tokens") as error:
        engine.attach(None, model=model).__enter__()
    assert error.value.rule == "T-RATIO"


def test_tka1_as_a_backend_refuses_compressed_layers(deepseek_v4, prompt):
    deepseek_v4.set_attn_implementation("tracekit")
    try:
        with pytest.raises(Unsupported, match="compressed rows"), torch.no_grad():
            deepseek_v4(torch.tensor([prompt(9)]))
    finally:
        deepseek_v4.set_attn_implementation("eager")


@pytest.mark.parametrize(
    "scalars",
    [
        *({"compressed_length": value} for value in (-1, "x", True, 1 << 40, None)),
        *({"mask_low_compressed": value} for value in (1.0, "x", None)),
    ],
    ids=str,
)
def test_a_hostile_plan_of_two_families_is_refused(deepseek_v4, recorded, prompt, scalars):
    deepseek_v4.set_attn_implementation("eager")
    got = recorded(deepseek_v4, lambda m: greedy(m, [prompt(9)], 1))
    call = next(c for c in got.calls if len(c.selection.families) > 1)
    for wrong in (scalars, {"compressed_length": call.launch.scalars["compressed_length"] - 1}):
        plan = replace(call.launch, scalars=call.launch.scalars | wrong)
        assert "launch plan" in Transformers().refuses(replace(call, launch=plan))
    one = next(c for c in got.calls if len(c.selection.families) == 1)
    plan = replace(one.launch, scalars=one.launch.scalars | {"compressed_length": 0})
    assert "two KV families" in Transformers().refuses(replace(one, launch=plan))
