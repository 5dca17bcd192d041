"""Gradients of one launch: those that torch gave to its tensors, and the right ones."""

import numpy as np
import pytest
import torch

from tests.engines_megatron.conftest import dense, documents, padded, plain
from tracekit.model import DType, Ranges
from tracekit.providers.torch_tensors import from_torch
from tracekit.recorder.api import CaptureIncomplete

SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}


def watched(model):
    """Watch by tensor hooks what the recorder takes from the graph, `{layer: {name: gradient}}`."""
    seen = {}

    def launched(core, args, out):
        for name, tensor in zip(("q", "k", "v", "out"), (*args[:3], out), strict=True):
            if tensor.requires_grad:
                keep = seen.setdefault(core.layer_number - 1, {})
                tensor.register_hook(lambda grad, name=name, keep=keep: keep.update({name: grad.clone()}))

    hooks = [
        layer.self_attention.core_attention.register_forward_hook(launched) for layer in model.decoder.layers
    ]
    return seen, hooks


@pytest.mark.parametrize("options", [{}, {"num_query_groups": 4}, SELECTIVE], ids=["gqa", "mha", "recompute"])
@pytest.mark.parametrize(
    "batch", [plain(8, 8), padded(9, 4, left=True), documents(4, 6)], ids=["plain", "left", "documents"]
)
def test_gradients_are_the_bits_that_torch_gave(gpt, recorded, batch, options):
    model = gpt(softmax_type="learnable", **options)
    seen, hooks = watched(model)
    got = recorded(model, batch.train)
    for hook in hooks:
        hook.remove()

    calls = [call for call in got.calls if call.grads is not None]
    assert sorted(call.layer for call in calls) == [0, 1]
    for call in calls:
        grads = {name: from_torch(grad, "")[0] for name, grad in seen[call.layer].items()}
        for t, row in enumerate(call.rows.ids):
            b, s = divmod(int(call.launch.row_slots[t]), batch.tokens.shape[1])
            d_kv = call.grads.d_kv[row.request]["dense"]
            assert np.array_equal(call.grads.d_out.data[t].reshape(-1), grads["out"][s, b])
            assert np.array_equal(call.grads.d_q.data[t], grads["q"][s, b])
            assert np.array_equal(d_kv.keys.data[row.position], grads["k"][s, b])
            assert np.array_equal(d_kv.values.data[row.position], grads["v"][s, b])
        sink = got.result[1][f"decoder.layers.{call.layer}.self_attention.core_attention.softmax_offset"]
        assert np.array_equal(call.grads.d_sink.to_float32(), sink.float().numpy())
        assert call.grads.d_out.dtype is call.grads.d_q.dtype is DType.BFLOAT16


def test_gradients_are_those_of_the_mathematics(gpt, recorded):
    """From the recorded words and dO alone, in binary64; FP32 sums of 9 terms are off by less than 1e-4."""
    got = recorded(gpt(dtype=torch.float32, softmax_type="learnable"), padded(9, 4).train)
    for call in got.calls:
        for index, key in enumerate(call.rows.requests):
            mine = call.rows.request == index
            held, grads = dense(call, index), call.grads.d_kv[key]["dense"]
            q, d_out = (torch.tensor(bits.to_float64()[mine]) for bits in (call.q, call.grads.d_out))
            k, v = (torch.tensor(bits.to_float64()) for bits in (held.keys, held.values))
            sink = torch.tensor(call.sink.to_float64())
            leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
            part = call.selection.families["dense"].take(np.flatnonzero(mine))
            assert isinstance(part, Ranges)
            rows = torch.arange(held.count)
            seen = (rows >= torch.tensor(part.lo)[:, None]) & (rows < torch.tensor(part.hi)[:, None])
            groups = call.num_heads // call.num_kv_heads
            wide_k, wide_v = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
            scores = torch.einsum("thd,nhd->htn", q, wide_k) * call.conventions.scale
            scores = scores.masked_fill(~seen, -torch.inf)
            extra = sink[:, None, None].expand(-1, scores.shape[1], 1)
            weights = torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1]
            out = torch.einsum("htn,nhd->thd", weights, wide_v)
            out.backward(d_out)
            for leaf, found in zip(
                leaves, (call.grads.d_q.take(mine), grads.keys, grads.values), strict=True
            ):
                size = float(leaf.grad.abs().max())
                assert size > 0
                assert np.abs(leaf.grad.numpy() - found.to_float64()).max() < 1e-4 * size


def test_microbatches_share_a_sink_and_keep_its_gradients_apart(gpt, recorded):
    """The sink is one parameter: a hook on it would see the sum of both."""

    def both(model):
        model.train()
        sum(batch.forward(model).float().pow(2).mean() for batch in (plain(8), plain(8, seed=9))).backward()

    got = recorded(gpt(softmax_type="learnable"), both)
    alone = [recorded(gpt(softmax_type="learnable"), plain(8, seed=seed).train) for seed in (0, 9)]
    for step, one in enumerate(alone):
        for layer in (0, 1):
            call = next(c for c in got.calls if (c.step, c.layer) == (step, layer))
            assert call.grads.d_sink.same(one.calls[layer].grads.d_sink)
            assert call.grads.d_q.same(one.calls[layer].grads.d_q)


def test_a_second_backward_is_never_merged(gpt, recorded):
    def twice(model):
        model.train()
        loss = plain(8).forward(model).float().pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()

    once = recorded(gpt(), plain(8).train)
    with pytest.warns(CaptureIncomplete, match="their backward ran again"):
        got = recorded(gpt(), twice)
    for call, alone in zip(got.calls, once.calls, strict=True):
        assert call.grads.d_q.same(alone.grads.d_q)
        assert call.grads.d_out.same(alone.grads.d_out)
    assert "ran again" in got.recording.notes["gradients"]


def test_gradients_that_padding_takes_part_in_are_not_kept(gpt, recorded):
    """A loss over every slot reaches the queries of padding, and through them keys, values and the sink."""
    batch = padded(9, 4)
    batch.real = ...
    with pytest.warns(CaptureIncomplete, match="rows of padding had a gradient"):
        got = recorded(gpt(softmax_type="learnable"), batch.train)
    for call in got.calls:
        assert call.grads.d_q.shape == call.q.shape
        assert (dict(call.grads.d_kv), call.grads.d_sink) == ({}, None)


def test_a_backward_that_never_comes_is_told(gpt, recorded):
    with pytest.warns(CaptureIncomplete, match="2 of 2 calls, their backward never ran"):
        got = recorded(gpt(), lambda model: plain(8).forward(model.train()))
    assert [call.grads for call in got.calls] == [None, None]
    assert [call.out is None for call in got.calls] == [False, False]


def test_a_backward_behind_the_recording_gives_nothing(gpt, recorded):
    late = []
    with pytest.warns(CaptureIncomplete):
        got = recorded(gpt(), lambda model: late.append(plain(8).forward(model.train()).float().sum()))
    late[0].backward()
    assert [call.grads for call in got.calls] == [None, None]


def test_gradients_that_nobody_asked_for_are_absent(gpt, recorded):
    """A frozen sink has no gradient; everything else has."""
    model = gpt(softmax_type="learnable", add_qkv_bias=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("softmax_offset"))

    def backward(model):
        model.train()
        plain(8).forward(model).float().pow(2).mean().backward()

    got = recorded(model, backward)
    assert got.session.problems == []
    assert all(call.grads.d_sink is None and call.grads.d_q is not None for call in got.calls)


def test_evaluation_waits_for_no_backward(gpt, recorded):
    got = recorded(gpt(), plain(8).forward)
    assert got.session.problems == []
    assert [call.grads for call in got.calls] == [None, None]


def test_a_graph_does_not_keep_the_tensors_of_its_launch(gpt, recorded):
    import gc
    import weakref

    model, alive = gpt(), []
    core = model.decoder.layers[0].self_attention.core_attention
    hook = core.register_forward_hook(lambda _, a, out: alive.extend(map(weakref.ref, (*a[:3], out))))

    def forward(model):
        plain(8).forward(model.train()).float().sum().backward()

    gc.collect()
    gc.disable()
    try:
        recorded(model, forward)
        assert [reference() for reference in alive] == [None] * 4
    finally:
        gc.enable()
        hook.remove()
