"""What cannot be recorded is refused by name, and never disturbs the engine or passes silently."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DynamicCache

from tracekit.engines import transformers as engine
from tracekit.engines import transformers_waiting
from tracekit.engines.driver import cache_argument, greedy, run_transformers
from tracekit.engines.models import load_model
from tracekit.errors import InvalidCall, NothingSelected, Unavailable, Unsupported, UsageError
from tracekit.model import KVFamily
from tracekit.recorder.api import CaptureIncomplete, record


class BypassAttention(nn.Module):
    """Attention that calls torch itself."""

    def __init__(self, layer):
        super().__init__()
        self.layer_idx = layer

    def forward(self, hidden, **_):
        heads = hidden.unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)


class BypassModel(nn.Module):
    class Config:
        model_type = "bypass"
        _attn_implementation = "sdpa"

        def to_dict(self):
            return {}

    def __init__(self):
        super().__init__()
        self.config = self.Config()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(BypassAttention(i) for i in range(2))

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_a_model_that_bypasses_the_interface(recorded):
    with pytest.raises(Unsupported, match="BypassModel ran 1 steps and never called") as error:
        recorded(BypassModel(), lambda m: m(torch.tensor([[1, 2, 3]])))
    assert error.value.rule == "R-BYPASS"


def test_a_layer_that_bypasses_the_interface_cuts_the_step(qwen3, recorded, prompt, monkeypatch):
    attention = qwen3.model.layers[1].self_attn
    monkeypatch.setattr(attention, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.warns(CaptureIncomplete, match="1 of 2 attention modules did not call"):
        got = recorded(qwen3, lambda m: m(torch.tensor([prompt(5)]), use_cache=False))

    (line,) = got.recording.ledger
    assert (line.expected, line.fired, line.recorded) == (2, 1, 1)
    assert not line.complete


def test_a_hook_that_raises_does_not_reach_the_engine(qwen3, recorded, prompt, monkeypatch):
    real = engine.capture_call

    def broken(kernel, call, *rest):
        if call.module.layer_idx == 1:
            raise ZeroDivisionError("of the hook")
        return real(kernel, call, *rest)

    tokens = greedy(qwen3, [prompt(5)], 3)
    monkeypatch.setattr(engine, "capture_call", broken)
    seen = []
    with pytest.warns(CaptureIncomplete, match="ZeroDivisionError"):
        got = recorded(qwen3, lambda m: seen.append(greedy(m, [prompt(5)], 3)))

    assert seen == [tokens]
    assert [call.layer for call in got.calls] == [0, 0, 0]
    assert all(line.cut and not line.complete for line in got.recording.ledger)
    assert all((line.expected, line.fired, line.recorded) == (2, 2, 1) for line in got.recording.ledger)


def test_a_cache_that_was_filled_before(qwen3, recorded, prompt):
    with torch.no_grad():
        cache = qwen3(torch.tensor([prompt(5)]), use_cache=True).past_key_values
    with pytest.raises(Unsupported, match="begin the recording before the prefill"):
        recorded(qwen3, lambda m: m(torch.tensor([[7]]), **{cache_argument(m): cache}))


def test_packed_sequences(qwen3, recorded):
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with pytest.raises(Unsupported, match="packed"):
        recorded(qwen3, lambda m: m(torch.tensor([[5, 6, 7, 8, 9]]), position_ids=positions, use_cache=False))


def test_a_cropped_cache(qwen3, recorded, prompt):
    def crop(model):
        with torch.no_grad():
            cache = model(torch.tensor([prompt(6)]), use_cache=True).past_key_values
            cache.crop(-2)
            model(torch.tensor([[9]]), **{cache_argument(model): cache})

    with pytest.warns(CaptureIncomplete, match="cropped, reordered or filled elsewhere"):
        got = recorded(qwen3, crop)
    assert [line.complete for line in got.recording.ledger] == [True, False]


def tokens_of(model, rows):
    """The token of each KV row of layer 0, whose value is a function of the token alone."""
    layer = model.model.layers[0]
    with torch.no_grad():
        hidden = layer.input_layernorm(model.model.embed_tokens.weight)
        table = layer.self_attn.v_proj(hidden).float().numpy()
    values = rows.values.to_float32().reshape(rows.count, -1)
    return [int(np.abs(table - value).sum(1).argmin()) for value in values]


def test_a_cache_that_is_reordered(qwen3, recorded, prompt):
    """Beam search moves rows between places: a kept call stands only under tokens that made its KV."""
    options = {"num_beams": 3, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    ids = torch.tensor([prompt(6)])
    with pytest.warns(CaptureIncomplete, match=r"KV row \d+ of request \d changed .*beam search"):
        got = recorded(qwen3, lambda m: m.generate(ids, pad_token_id=0, **options))

    ledger = got.recording.ledger
    first = next(line.step for line in ledger if line.cut)
    assert 0 < first < len(ledger) - 1
    assert all(line.complete for line in ledger[:first])
    assert all(line.cut and line.recorded == 0 for line in ledger[first:])
    assert {call.step for call in got.calls} == set(range(first))
    for request in got.recording.requests:
        rows = got.at(layer=0, step=first - 1).kv[request.key][KVFamily.DENSE]
        assert tokens_of(qwen3, rows) == request.token_ids[: rows.count].tolist()


@pytest.mark.parametrize("filters", [{"steps": [0, 9]}, {"rows": [2, 14]}], ids=["steps", "rows"])
def test_a_cache_that_is_reordered_between_two_recorded_steps(qwen3, recorded, prompt, filters):
    options = {"num_beams": 3, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    ids = torch.tensor([prompt(6)])
    with pytest.warns(CaptureIncomplete, match="is not followed any more, as its KV changed at step"):
        got = recorded(qwen3, lambda m: m.generate(ids, pad_token_id=0, **options), **filters)

    assert {call.step for call in got.calls} == {0}
    assert got.recording.ledger[9].cut
    (told,) = got.recording.history
    assert told.reason.startswith("KV was reordered or written over before step")


def test_steps_that_are_left_out_of_a_cache_in_order_change_nothing(qwen3, recorded, prompt):
    whole = recorded(qwen3, lambda m: greedy(m, [prompt(6), prompt(3)], 6))
    some = recorded(qwen3, lambda m: greedy(m, [prompt(6), prompt(3)], 6), steps=[0, 4])

    assert {call.step for call in some.calls} == {0, 4}
    assert all(line.complete for line in some.recording.ledger)
    for call in some.calls:
        same = whole.at(layer=call.layer, step=call.step)
        assert call.out.bits.same(same.out.bits)
        assert [call.rows.token_ids.tolist()] == [same.rows.token_ids.tolist()]


def test_a_cache_whose_rows_cannot_be_placed(qwen3, recorded, prompt):
    from transformers import StaticCache

    cache = StaticCache(config=qwen3.config, max_cache_len=32)
    with torch.no_grad(), pytest.raises(Unsupported, match=r"is a StaticLayer.*pass a DynamicCache"):
        recorded(qwen3, lambda m: m(torch.tensor([prompt(5)]), **{cache_argument(m): cache}))


def test_a_mask_that_is_written_to_after_its_launch(qwen3, recorded, prompt):
    def write(module, args, kwargs):
        kwargs["attention_mask"].fill_(True)

    def act(model):
        ids, padding = torch.tensor([[0, 0, *prompt(5)], prompt(7)]), torch.ones(2, 7, dtype=torch.int64)
        padding[0, :2] = 0
        cache = {cache_argument(model): DynamicCache(config=model.config)}
        with torch.no_grad():
            model(ids, attention_mask=padding, use_cache=True, **cache)

    hook = qwen3.model.layers[1].self_attn.register_forward_pre_hook(write, with_kwargs=True)
    try:
        with pytest.raises(Unsupported, match=r"layer 0: its keys or values.* or its mask was"):
            recorded(qwen3, act)
    finally:
        hook.remove()


def test_what_waits_in_vain_is_copied_once(qwen3, recorded, prompt, monkeypatch):
    """A layer that cannot be recorded does not fill the memory with copies of its later launches."""
    copies = []
    real = transformers_waiting.own
    monkeypatch.setattr(
        transformers_waiting, "own", lambda tensor, arena: copies.append(1) or real(tensor, arena)
    )
    for layer in qwen3.model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.5)
        layer.self_attn.training = True
    try:
        with pytest.raises(Unsupported, match="dropout"), torch.no_grad():
            recorded(qwen3, lambda m: greedy(m, [prompt(5)], 4))
    finally:
        qwen3.eval()
    assert len(copies) == 2 * len(qwen3.model.layers)


@pytest.mark.parametrize("tensor", ["keys", "values"])
def test_a_cache_that_is_written_to_after_its_launch(qwen3, recorded, prompt, tensor):
    """Launches of few rows are looked at when their forward ends; what they read must still be there then."""
    cache = DynamicCache(config=qwen3.config)

    def write(*_):
        if cache.get_seq_length() > 60:
            getattr(cache.layers[0], tensor)[0, 0, 2, 1] += 1

    def act(model):
        with torch.no_grad():
            model(torch.tensor([prompt(60)]), use_cache=True, **{cache_argument(model): cache})
            model(torch.tensor([[7]]), use_cache=True, **{cache_argument(model): cache})

    hook = qwen3.model.layers[0].register_forward_hook(write)
    try:
        with pytest.warns(CaptureIncomplete, match="layer 0: its keys or values were written to between"):
            got = recorded(qwen3, act)
    finally:
        hook.remove()
    assert {(call.step, call.layer) for call in got.calls} == {(0, 0), (0, 1), (1, 1)}
    assert got.recording.ledger[1].recorded == 1


@pytest.mark.parametrize("few", [transformers_waiting.FEW, -1], ids=["small", "held by the cache"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_launches_that_wait_and_those_that_do_not_are_the_same(
    qwen3, recorded, prompt, monkeypatch, mode, few
):
    waits = []

    def noted(*seen):
        waits.append(transformers_waiting.may_wait(*seen))
        return waits[-1]

    def act(model):
        with mode():
            greedy(model, [prompt(5), prompt(9)], 3)

    monkeypatch.setattr(transformers_waiting, "FEW", few)
    monkeypatch.setattr(engine, "may_wait", noted)
    waited = recorded(qwen3, act)
    assert set(waits) == {mode is torch.no_grad}
    monkeypatch.setattr(engine, "may_wait", lambda *_: False)
    at_once = recorded(qwen3, act)

    assert len(waited.calls) == len(at_once.calls) == 2 * 3
    for ours, theirs in zip(waited.calls, at_once.calls, strict=True):
        assert np.array_equal(ours.q.data, theirs.q.data)
        assert np.array_equal(ours.out.bits.data, theirs.out.bits.data)
        assert ours.launch.scalars == theirs.launch.scalars
        for key, families in ours.kv.items():
            for family, rows in families.items():
                assert np.array_equal(rows.keys.data, theirs.kv[key][family].keys.data)
                assert np.array_equal(rows.values.data, theirs.kv[key][family].values.data)


def test_mixed_dtypes(qwen3, recorded, prompt, monkeypatch):
    """Values in another dtype than q and k: the function below takes it, a trace does not."""
    from transformers import AttentionInterface

    original = AttentionInterface._global_mapping["sdpa"]

    def lenient(module, q, k, v, mask, **kwargs):
        return original(module, q, k, v.to(q.dtype), mask, **kwargs)

    def action(model):
        layer = AttentionInterface._global_mapping["sdpa"]
        module = model.model.layers[0].self_attn

        def hook(_, args, kwargs):
            q = torch.zeros(1, 4, 3, 32, dtype=torch.bfloat16)
            layer(module, q, q[:, :2], q[:, :2].float(), None, scaling=1.0)

        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            model(torch.tensor([[5, 6, 7]]), use_cache=False)
        finally:
            handle.remove()

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", lenient)
    with pytest.warns(CaptureIncomplete, match="mixes dtypes"):
        got = recorded(qwen3, action)
    assert "values float32" in got.recording.ledger[0].cut


def test_models_of_a_later_day(qwen3, monkeypatch):
    monkeypatch.setattr(type(qwen3.config), "model_type", "glm_moe_dsa")
    with pytest.raises(Unsupported, match="glm_moe_dsa is not recorded yet"):
        engine.attach(None, model=qwen3).__enter__()


def test_an_implementation_that_is_not_recorded(qwen3, monkeypatch):
    monkeypatch.setattr(qwen3.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(Unsupported, match="runs flash_attention_2"):
        engine.attach(None, model=qwen3).__enter__()


def test_filters_that_leave_nothing(qwen3, recorded, prompt):
    with pytest.raises(NothingSelected, match="leave none of the 2 calls"):
        recorded(qwen3, lambda m: greedy(m, [prompt(5)], 1), layers=[7])


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"model": "no-such-model"}, Unavailable, "no model 'no-such-model' here"),
        ({"prompts": ["text"]}, UsageError, "no tokenizer"),
        ({"prompts": [[]]}, UsageError, "at least one token"),
        ({"prompts": [[999]]}, UsageError, "below 256"),
        ({"max_new_tokens": -1}, UsageError, "at least 0"),
        ({"max_new_tokens": 10**20}, UsageError, "at most 1022 new tokens"),
    ],
)
def test_the_driver_names_what_is_wrong(arguments, kind, match, tmp_path):
    with pytest.raises(kind, match=match):
        run_transformers(
            **({"model": "tiny-qwen3", "prompts": [[5, 6]], "out": tmp_path / "x.h5"} | arguments)
        )


@pytest.mark.parametrize("implementation", [None, "sdpa"])
def test_a_checkpoint_that_transformers_does_not_know(tmp_path, implementation):
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(UsageError, match=r"does not load .*nonsense") as error:
        load_model(str(tmp_path), implementation)
    assert error.value.rule == "E-CHECKPOINT"
    assert "None" not in str(error.value)


def test_an_attention_that_the_model_does_not_take():
    with pytest.raises(
        UsageError, match=r"tiny-gpt-oss does not run with attention sdpa: .*Try eager"
    ) as error:
        load_model("tiny-gpt-oss", "sdpa")
    assert error.value.rule == "E-IMPLEMENTATION"


def test_a_module_that_is_no_model_of_transformers(recorded):
    with pytest.raises(Unsupported, match="Linear is no model of transformers"):
        recorded(torch.nn.Linear(2, 2), lambda _: None)


def test_an_engine_that_is_not_known():
    with (
        pytest.raises(UsageError, match=r"the engines are .*transformers"),
        record("unused.h5", engine="transformer"),
    ):
        pass


def test_manual_arrays_of_two_dtypes():
    half, single = np.zeros((3, 2, 4), np.float16), np.zeros((3, 2, 4), np.float32)
    with (
        pytest.raises(InvalidCall, match="q float16, keys float32"),
        record("unused.h5", write=lambda *_: None) as session,
        session.step({"a": [1, 2, 3]}),
    ):
        session.attention(layer=0, q=half, keys=single, values=single, scale=1.0)
