"""What cannot be recorded is refused in a sentence, in the ledger, and never disturbs the model."""

import pytest
import torch

from tests.engines_megatron.conftest import padded, plain
from tracekit.engines import megatron as adapter
from tracekit.engines import megatron_call
from tracekit.engines import megatron_tiny as tiny
from tracekit.errors import NothingSelected, Unsupported
from tracekit.model import scale_to_bits
from tracekit.recorder.api import CaptureIncomplete, record
from tracekit.recorder.session import Session

pytestmark = pytest.mark.filterwarnings("ignore::tracekit.recorder.api.CaptureIncomplete")


def refused(recorded, model, action):
    """Run an action whose calls are all refused; return what the user is told."""
    with pytest.raises(Unsupported) as caught:
        recorded(model, action)
    assert caught.value.rule == "R-NOTHING"
    return str(caught.value)


def interrupted(model, action):
    """Record an action that raises an AssertionError; return what was kept."""
    written = []

    def run():
        with record("x.h5", engine="megatron", model=model, write=lambda *args: written.append(args)):
            action(model)

    with pytest.raises(AssertionError):
        run()
    return written[0][1:]


def changed(batch, **fields):
    for name, value in fields.items():
        setattr(batch, name, value)
    return batch


MASKS = {
    "M-MASK": [
        changed(plain(6, 6), mask=torch.zeros(2, 4, 6, 6, dtype=torch.bool)),
    ],
    "M-MASK-EMPTY": [changed(plain(6), mask=tiny.causal(6) | (torch.arange(6) == 3)[:, None])],
    "M-MASK-ACROSS": [
        changed(plain(6), positions=torch.tensor([[0, 1, 2, 0, 1, 2]])),
    ],
    "M-POSITION": [
        changed(plain(6), positions=torch.tensor([[0, 1, 2, 5, 6, 7]])),
        changed(plain(6), positions=torch.arange(5, 11)[None]),
    ],
    "M-EMPTY": [changed(plain(6), mask=torch.ones(1, 1, 6, 6, dtype=torch.bool))],
}
NAMES = {
    "M-MASK": "the attention mask is",
    "M-MASK-EMPTY": "may read no key",
    "M-MASK-ACROSS": "reads padding or another request",
    "M-POSITION": "position_ids ",
    "M-EMPTY": "no slot of the batch holds a token",
}


@pytest.mark.parametrize(("rule", "batch"), [(rule, b) for rule, batches in MASKS.items() for b in batches])
def test_a_batch_that_is_not_understood_is_refused_and_runs(gpt, recorded, rule, batch):
    model = gpt()
    with torch.no_grad():
        wanted = batch.forward(model)
    assert NAMES[rule] in refused(recorded, model, batch.forward)
    with torch.no_grad():
        assert torch.equal(batch.forward(model), wanted)


def test_a_mask_type_that_hides_nothing_is_refused(gpt, recorded):
    """Without a mask only a causal module makes one; any other reads every key."""
    from megatron.core.transformer.enums import AttnMaskType

    model = tiny.gpt()
    for layer in model.decoder.layers:
        core = layer.self_attention.core_attention
        core.attn_mask_type = core.scale_mask_softmax.attn_mask_type = AttnMaskType.padding
    told = refused(recorded, model, changed(plain(6), mask=None).forward)
    assert "mask type padding and got no mask" in told


def test_one_bad_forward_cuts_its_step_alone(gpt, recorded):
    bad = changed(plain(6), positions=torch.tensor([[0, 1, 2, 5, 6, 7]]))

    def three(model):
        for batch in (plain(6), bad, plain(6, seed=4)):
            batch.forward(model)

    with pytest.warns(CaptureIncomplete, match="position_ids go from 2 to 5"):
        got = recorded(gpt(), three)
    assert [(call.step, call.layer) for call in got.calls] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert [line.complete for line in got.recording.ledger] == [True, False, True]
    assert "position_ids" in got.recording.ledger[1].cut


def test_dropout_is_refused_in_training_alone(gpt, recorded):
    model = gpt(attention_dropout=0.5)
    assert "drops out 0.5" in refused(recorded, model, plain(6).train)
    assert len(recorded(model.eval(), plain(6).forward).calls) == 2


def test_middle_stages_and_inference_are_refused(gpt, recorded):
    model = gpt()
    hidden = torch.zeros(6, 1, 64, dtype=torch.bfloat16)
    told = refused(recorded, model, lambda m: m(None, None, tiny.causal(6), decoder_input=hidden))
    assert "has no input_ids" in told


def test_packed_sequences_are_refused_by_the_engine_itself(gpt):
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    params = PackedSeqParams("thd", starts, starts, max_seqlen_q=4, max_seqlen_kv=4)
    packed = changed(plain(6), mask=None, more={"packed_seq_params": params})
    recording, calls = interrupted(gpt(), lambda model: (plain(6).forward(model), packed.forward(model)))
    assert len(calls) == 2
    assert "Packed sequence is not supported by DotProductAttention" in recording.notes["recording"]
    assert not recording.ledger[-1].complete


def test_a_model_of_something_else_is_refused():
    for model in (torch.nn.Linear(2, 2), object(), [torch.nn.Linear(2, 2)]):
        with (
            pytest.raises(Unsupported, match="is no language model of Megatron-core") as caught,
            record("x.h5", engine="megatron", model=model),
        ):
            pass
        assert caught.value.rule == "M-MODEL"


def test_another_core_attention_is_refused_by_name(gpt):
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Mine(DotProductAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    with (
        pytest.raises(Unsupported, match="Mine is not recorded") as caught,
        record("x.h5", engine="megatron", model=gpt(core_attention=Mine)),
    ):
        pass
    assert caught.value.rule == "M-CORE"


def test_a_model_that_never_calls_its_core_attention(gpt, recorded):
    model = tiny.gpt()
    for layer in model.decoder.layers:
        layer.self_attention.forward = lambda hidden, *_, **__: (torch.zeros_like(hidden), None)
    with pytest.raises(Unsupported, match="never called the attention interface") as caught:
        recorded(model, plain(6).forward)
    assert caught.value.rule == "R-BYPASS"


def test_a_hook_that_is_gone_is_named(gpt, monkeypatch):
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    def forward(self, query, key, value, attention_mask, attn_mask_type=None):
        return query

    monkeypatch.setattr(DotProductAttention, "forward", forward)
    with (
        pytest.raises(Unsupported, match="takes no packed_seq_params any more") as caught,
        record("x.h5", engine="megatron", model=gpt()),
    ):
        pass
    assert caught.value.rule == "M-HOOK"


def test_two_layers_of_one_number_and_context_parallelism(gpt):
    model = tiny.gpt()
    model.decoder.layers[1].self_attention.core_attention.layer_number = 1
    with pytest.raises(Unsupported) as caught, record("x.h5", engine="megatron", model=model):
        pass
    assert caught.value.rule == "M-LAYER"
    model.config.context_parallel_size = 2
    with pytest.raises(Unsupported) as caught, record("x.h5", engine="megatron", model=model):
        pass
    assert caught.value.rule == "M-CP"


def test_a_hook_that_fails_never_reaches_the_model(gpt, recorded, monkeypatch):
    model, batch = gpt(), plain(6)
    wanted = batch.train(model)[0]
    monkeypatch.setattr(adapter, "observe_call", lambda *_: 1 / 0)
    told = []

    def train(model):
        told.append(batch.train(model)[0])

    assert "ZeroDivisionError" in refused(recorded, model, train)
    assert torch.equal(told[0], wanted)


@pytest.mark.parametrize("name", ["begin", "wants", "observe", "end"])
def test_any_part_of_the_recorder_that_fails_leaves_the_model(gpt, monkeypatch, name):
    """The second forward of three is cut, and all three compute what they compute."""
    model, batches = gpt(), [plain(6, seed=i) for i in range(3)]
    wanted = [batch.forward(model) for batch in batches]
    real, calls, written, told = getattr(Session, name), [], [], []

    def broken(self, *args, **kwargs):
        calls.append(name)
        if len(calls) == 2:
            raise ZeroDivisionError("mine")
        return real(self, *args, **kwargs)

    with record("x.h5", engine="megatron", model=model, write=lambda *args: written.append(args)):
        monkeypatch.setattr(Session, name, broken)
        told = [batch.forward(model) for batch in batches]
        monkeypatch.undo()
    assert all(torch.equal(one, other) for one, other in zip(told, wanted, strict=True))
    assert any("ZeroDivisionError('mine')" in line.cut for line in written[0][1].ledger)


def test_an_untested_version_is_recorded_only_where_its_numbers_fit(gpt, recorded, monkeypatch):
    monkeypatch.setattr(adapter, "engine_version", lambda: "0.99.1")
    with pytest.warns(adapter.UntestedVersion, match="0.99.1 is outside the tested versions 0.19"):
        got = recorded(gpt(softmax_type="learnable"), padded(9, 4).forward)
    assert len(got.calls) == 2
    assert "0.99.1" in got.recording.notes["version"]

    monkeypatch.setattr(megatron_call, "scale_to_bits", lambda scale: scale_to_bits(3 * scale))
    with (
        pytest.warns(adapter.UntestedVersion),
        pytest.raises(Unsupported, match="is not what the recorder was made for") as caught,
    ):
        recorded(gpt(), plain(9).forward)
    assert caught.value.rule == "R-NOTHING"


def test_filters_that_leave_nothing(gpt, recorded):
    with pytest.raises(NothingSelected):
        recorded(gpt(), plain(6).forward, layers=[7])


def test_a_training_run_that_dies_leaves_what_was_recorded(gpt):
    def train(model):
        plain(6).train(model)
        raise AssertionError("out of memory")

    recording, calls = interrupted(gpt(), train)
    assert len(calls) == 2
    assert all(call.grads is not None for call in calls)
    assert "out of memory" in recording.ledger[-1].cut
