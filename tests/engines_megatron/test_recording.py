"""What is recorded of Megatron-core is what its core attention got and gave, bit for bit."""

import gc
import threading
import weakref
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

import tracekit
from tests.engines_megatron.conftest import dense, documents, ids, padded, plain
from tracekit.compare import Roundings, compare_envelope, envelope
from tracekit.engines import megatron_tiny as tiny
from tracekit.engines.megatron import attach
from tracekit.model import Lists, Mode, Origin, Ranges, RequestKey
from tracekit.providers.base import Launch
from tracekit.providers.megatron import Megatron
from tracekit.providers.torch_tensors import from_torch
from tracekit.recorder.api import CaptureIncomplete, record
from tracekit.recorder.session import Session

SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OPTIONS = {
    "plain": {},
    "sinks": {"softmax_type": "learnable"},
    "off by one": {"softmax_type": "off-by-one"},
    "one head group": {"num_query_groups": 4},
    "fp32": {"dtype": torch.float32, "softmax_type": "learnable"},
    "fp16": {"dtype": torch.float16},
    "layer scaling": {"apply_query_key_layer_scaling": True},
    "softmax in bf16": {"attention_softmax_in_fp32": False},
    "selective recompute": {"softmax_type": "learnable", **SELECTIVE},
    "full recompute": FULL,
}
BATCHES = {
    "two sequences": plain(12, 12),
    "right padding": padded(12, 5, 9),
    "left padding": padded(12, 5, 9, left=True),
    "documents": documents(5, 7, 3),
    "one token": plain(1),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logits_and_gradients_are_the_same_with_recording_on_and_off(gpt, recorded, options):
    model, batch = gpt(**options), padded(12, 5)
    logits, grads = batch.train(model)
    got = recorded(model, batch.train)

    assert torch.equal(got.result[0], logits)
    assert grads.keys() == got.result[1].keys()
    assert all(torch.equal(got.result[1][name], grad) for name, grad in grads.items())
    assert got.session.problems == []


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_o_lies_in_its_envelope(gpt, recorded, options):
    """Against binary64 from the recorded words alone: scale, sink, mask and heads are what they say."""
    got = recorded(gpt(**options), padded(12, 5).forward)
    assert len(got.calls) == 2
    for call in got.calls:
        declared = call.conventions
        bound = envelope(call, Roundings(declared.score_dtype, declared.probability_dtype))
        found = compare_envelope(call, bound, call.out.bits, None, declared)
        assert found.outside.first is None
        assert found.outside.compared.elements == call.out.bits.size
        assert call.lse.origin is Origin.DERIVED


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_every_word_is_the_engines_own(gpt, recorded, batch):
    """Q, K, V and O against what the module was called with, row by row, found by token and position."""
    model, seen = gpt(softmax_type="learnable"), []
    cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
    with torch.no_grad():
        hooks = [core.register_forward_hook(lambda _, a, out: seen.append((*a[:3], out))) for core in cores]
        got = recorded(model, batch.forward)
    for hook in hooks:
        hook.remove()

    assert [call.layer for call in got.calls] == [0, 1]
    assert {call.mode for call in got.calls} == {Mode.PREFILL}
    hidden = batch.mask.expand(batch.tokens.shape[0], -1, -1, -1)[:, 0].numpy()
    for call, core, tensors in zip(got.calls, cores, seen, strict=True):
        q, k, v, out = (from_torch(tensor, "")[0] for tensor in tensors)
        assert np.array_equal(call.sink.to_float32(), core.softmax_offset.detach().float().numpy())
        checked = 0
        for t, row in enumerate(call.rows.ids):
            b, s = divmod(int(call.launch.row_slots[t]), batch.tokens.shape[1])
            held = call.kv[row.request]["dense"]
            assert call.rows.token_ids[t] == batch.tokens[b, s]
            assert row.position == batch.positions[b, s]
            assert np.array_equal(call.q.data[t], q[s, b])
            assert np.array_equal(call.out.bits.data[t].reshape(-1), out[s, b])
            assert np.array_equal(held.keys.data[row.position], k[s, b])
            assert np.array_equal(held.values.data[row.position], v[s, b])
            read = np.flatnonzero(~hidden[b, s])
            assert read.size == call.selection.counts()[t]
            checked += 1
        assert checked == call.num_rows > 0


def test_a_request_is_its_tokens_wherever_it_stands(gpt, recorded):
    model = gpt()
    alone, left, right, packed = (
        recorded(model, batch.forward)
        for batch in (plain(5, seed=1), padded(9, 5, left=True), padded(9, 5), documents(9, 5))
    )
    key = RequestKey.of_prompt(ids(5, 1))
    assert [key in got.calls[0].rows.requests for got in (alone, left, right, packed)] == [True] * 4
    positions = [
        [row.position for row in got.calls[0].rows.ids if row.request == key]
        for got in (alone, left, right, packed)
    ]
    assert positions == [list(range(5))] * 4
    assert all(isinstance(got.calls[0].selection.families["dense"], Ranges) for got in (alone, left, packed))


def test_a_mask_of_holes_is_a_selection_of_lists(gpt, recorded):
    batch = plain(12)
    holes = torch.ones(12, 12, dtype=torch.bool).tril(-1).logical_and(torch.arange(12) % 3 == 1)
    batch.mask = batch.mask | holes
    got = recorded(gpt(), batch.forward)

    part = got.calls[0].selection.families["dense"]
    assert isinstance(part, Lists)
    assert part.row(8).tolist() == [0, 2, 3, 5, 6, 8]
    call = got.calls[0]
    bound = envelope(call, Roundings(call.conventions.score_dtype, call.conventions.probability_dtype))
    assert compare_envelope(call, bound, call.out.bits, None, call.conventions).outside.first is None


@pytest.mark.parametrize("options", [SELECTIVE, FULL], ids=["selective", "full"])
def test_a_recomputed_launch_is_a_call_of_its_own(gpt, recorded, options):
    """Checkpointing makes the launches of a forward again in its backward, last layer first."""
    model, first, second = gpt(softmax_type="learnable", **options), plain(8, 8), padded(6, 4, seed=5)

    def two_microbatches(model):
        model.train()
        losses = [batch.forward(model).float().pow(2).mean() for batch in (first, second)]
        for loss in losses:
            loss.backward()

    got = recorded(model, two_microbatches)

    assert [(call.step, call.mode, call.layer) for call in got.calls] == [
        *((step, Mode.TRAINING, layer) for step in (0, 1) for layer in (0, 1)),
        *((step, Mode.RECOMPUTE, layer) for step in (2, 3) for layer in (1, 0)),
    ]
    assert [line.complete for line in got.recording.ledger] == [True] * 4
    assert [line.expected for line in got.recording.ledger] == [2] * 4
    for original, again in ((0, 5), (1, 4), (2, 7), (3, 6)):
        one, two = got.calls[original], got.calls[again]
        assert one.rows.ids == two.rows.ids
        assert one.q.same(two.q)
        assert one.out.bits.same(two.out.bits)
        assert (dense(one).generation, dense(two).generation) == (0, 1)
        assert dense(one).keys.same(dense(two).keys)
        assert (one.grads, two.grads is None) == (None, False)


def test_filters_leave_layers_and_steps_out(gpt, recorded):
    def twice(model):
        plain(6).train(model)
        plain(6, seed=3).train(model)

    got = recorded(gpt(), twice, layers=[1], steps=[1])
    assert [(call.layer, call.step) for call in got.calls] == [(1, 1)]
    assert [line.filtered for line in got.recording.ledger] == [2, 1]
    assert got.session.problems == []


def test_wrappers_are_looked_through(gpt, recorded):
    class Float16Module(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    got = recorded(Float16Module(gpt()), plain(6).forward)
    assert len(got.calls) == 2
    assert got.recording.identity.architecture == "GPTModel"
    assert len(got.recording.identity.weights_digest) == len(got.recording.identity.config_digest) == 64


def test_off_means_off(gpt, recorded):
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    model = gpt()
    functions = random.checkpoint, tensor_parallel.checkpoint
    modules = [layer.self_attention.core_attention for layer in model.decoder.layers]
    classes = [type(module).forward for module in modules]
    with record("unused.h5", engine="megatron", model=model, write=lambda *_, **__: None):
        assert random.checkpoint is not functions[0]
        assert all("forward" in vars(module) for module in modules)
        plain(6).forward(model)

    assert (random.checkpoint, tensor_parallel.checkpoint) == functions
    assert random.checkpoint is functions[0]
    assert not any("forward" in vars(module) for module in modules)
    assert [type(module).forward for module in modules] == classes
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_trace_is_written_and_replayed(gpt, tmp_path):
    with record(tmp_path / "run.h5", engine="megatron", model=gpt(softmax_type="learnable")) as session:
        padded(20, 9).train(gpt(softmax_type="learnable"))
    assert session.problems == []
    assert tracekit.verify(tmp_path / "run.h5") == []
    report = tracekit.replay(tmp_path / "run.h5", claims=["recorded", "rerun", "control"])
    assert report.exit_code == 0
    assert report.find("recorded", "megatron").status is tracekit.Status.HELD
    assert report.find("recorded", "megatron").control == "twin-recorded refuted"
    assert report.find("rerun", "megatron").status is tracekit.Status.HELD
    assert report.find("control", "trace").status is tracekit.Status.BOUNDED


@pytest.fixture
def masks_on_cpu(monkeypatch):
    """Megatron makes its own masks on the GPU; here the same function makes them on the CPU."""
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device=None, **more: ones(*size, **more))


@pytest.mark.parametrize("window", [None, (3, 0)], ids=["causal", "window"])
def test_a_mask_that_the_module_makes_itself(gpt, recorded, masks_on_cpu, window):
    model = gpt(softmax_type="learnable", **({} if window is None else {"window_size": window}))
    batch = replace(plain(12, 12), mask=None)
    got = recorded(model, batch.forward)
    assert got.session.problems == []
    for call in got.calls:
        part = call.selection.families["dense"]
        reach = 12 if window is None else 4
        assert (part.hi - part.lo).tolist() == [min(row.position + 1, reach) for row in call.rows.ids]
        assert call.conventions.window == (None if window is None else 4)
        declared = call.conventions
        bound = envelope(call, Roundings(declared.score_dtype, declared.probability_dtype))
        assert compare_envelope(call, bound, call.out.bits, None, declared).outside.first is None
        answer = Megatron().run(Launch((replace(call, out=None, lse=None),)))
        assert answer.tensors[0].out.same(call.out.bits)


@pytest.mark.parametrize("trained", [False, True])
def test_a_model_that_is_deleted_is_freed_and_what_it_did_is_kept(trained):
    model, batch = tiny.gpt(num_layers=2), padded(9, 5)
    session = Session()
    with ExitStack() as stack:
        stack.enter_context(attach(session, model=model))
        if trained:
            batch.train(model)
        else:
            batch.forward(model)
        layer = model.decoder.layers[1].self_attention
        gone = [weakref.ref(module) for module in (model, layer, layer.core_attention)]
        del model, layer
        gc.collect()
        assert [reference() for reference in gone] == [None, None, None]
    recording, calls = session.finish()
    assert [line.complete for line in recording.ledger] == [True]
    assert [call.layer for call in calls] == [0, 1]
    assert all((call.grads is not None) == trained for call in calls)


def test_a_model_whose_hooks_are_taken_away_is_told(recorded):
    model, batch = tiny.gpt(), plain(6)

    def run(model):
        batch.forward(model)
        model._forward_pre_hooks.clear()
        model._forward_hooks.clear()
        batch.forward(model)

    with pytest.warns(
        CaptureIncomplete, match=r"hooks of the model were taken away|outside the model's forward"
    ):
        got = recorded(model, run)
    assert [line.complete for line in got.recording.ledger] == [True, False]


def test_a_forward_of_another_thread_is_refused_and_told(gpt, recorded):
    """It runs while the first one is inside its second layer, over as many tokens."""
    model, first, second = gpt(), plain(6), plain(6, seed=1)
    expected = first.forward(model), second.forward(model)
    found = []

    def other(*_):
        if not found:
            found.append(None)
            thread = threading.Thread(target=lambda: found.append(second.forward(model)))
            thread.start()
            thread.join()

    def run(model):
        handle = model.decoder.layers[1].register_forward_pre_hook(other)
        found.append(first.forward(model))
        handle.remove()

    with pytest.warns(CaptureIncomplete, match="one at a time"):
        got = recorded(model, run)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[0])
    assert [line.complete for line in got.recording.ledger] == [True, False]
    (request,) = got.recording.requests
    assert request.token_ids.tolist() == first.tokens[0].tolist()
