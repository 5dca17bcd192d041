"""Megatron trains on TKA-1: the gradients of its definition, whatever stands beside a sequence."""

import numpy as np
import pytest
import torch

import tracekit
from tests.engines_megatron.conftest import documents, padded, plain
from tests.engines_megatron.test_backend import SINKS, operands
from tracekit.engines import megatron_backend as backend
from tracekit.model import Bits, DType, Mode
from tracekit.providers.base import Execution, Launch
from tracekit.providers.portable import Tka1
from tracekit.providers.torch_tensors import from_torch
from tracekit.recorder.api import record

SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}


def trained(q, k, v, d_out, *more):
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = backend.attention(q, k, v, *more)
    out.backward(d_out)
    return [np.array(from_torch(x, "")[0]) for x in (out, q.grad, k.grad, v.grad)]


def test_company_padding_and_packing_change_no_bit_of_a_gradient():
    q, k, v = operands(7)
    d_out = torch.randn(7, 1, 4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    alone = trained(q, k, v, d_out)
    others = operands(12, 2, seed=5)
    for left in (False, True):
        batch = padded(7, 12, left=left)
        at = slice(5, 12) if left else slice(0, 7)
        beside = [other.clone() for other in others]
        grad = torch.randn(12, 2, 4, 16).bfloat16()
        for tensor, own in zip((*beside, grad), (q, k, v, d_out), strict=True):
            tensor[at, 0] = own[:, 0]
        for got, want in zip(trained(*beside, grad, batch.mask), alone, strict=True):
            assert np.array_equal(got[at, 0], want[:, 0])
    packed = [torch.cat([other[:5, :1], own]) for other, own in zip(others, (q, k, v), strict=True)]
    grad = torch.cat([torch.randn(5, 1, 4, 16).bfloat16(), d_out])
    for got, want in zip(trained(*packed, grad, documents(5, 7).mask), alone, strict=True):
        assert np.array_equal(got[5:, 0], want[:, 0])


@pytest.mark.parametrize("options", [{}, SELECTIVE], ids=["plain", "recompute"])
@pytest.mark.parametrize(
    "batch", [plain(12, 12), padded(12, 5, left=True), documents(5, 7)], ids=["plain", "left", "documents"]
)
def test_a_training_step_is_recorded_with_the_gradients_of_the_definition(gpt, batch, options, tmp_path):
    model = gpt(core_attention=backend.Tka1Attention, **SINKS, **options)
    with record(tmp_path / "run.h5", engine="megatron", model=model) as session:
        batch.train(model)
    assert session.problems == []

    with tracekit.open(tmp_path / "run.h5") as trace:
        calls = [trace.call(i) for i in range(len(trace))]
    calls = [call for call in calls if call.grads is not None]
    assert sorted(call.layer for call in calls) == [0, 1]
    assert {call.mode for call in calls} == {Mode.RECOMPUTE if options else Mode.TRAINING}
    for call in calls:
        (tensors,) = Tka1().run(Launch((call,), Execution(grad=True))).tensors
        got = tensors.grads
        assert tensors.out.same(call.out.bits)
        assert same_after_rounding(got.d_q, call.grads.d_q)
        for key in call.rows.requests:
            want = call.grads.d_kv[key]["dense"]
            assert same_after_rounding(got.d_kv[key]["dense"].keys, want.keys)
            assert same_after_rounding(got.d_kv[key]["dense"].values, want.values)
    if not options:
        report = tracekit.replay(
            tmp_path / "run.h5", provider="tka1", claims=["recorded", "grad", "backward"]
        )
        assert report.exit_code == 0
        assert {v.status for v in report.verdicts} == {tracekit.Status.HELD}


def same_after_rounding(exact: Bits, recorded: Bits) -> bool:
    assert exact.dtype is DType.FLOAT32
    assert recorded.dtype is DType.BFLOAT16
    return Bits.from_float32(exact.to_float32(), DType.BFLOAT16).same(recorded)


def test_logits_are_the_same_with_and_without_gradients(gpt):
    model = gpt(core_attention=backend.Tka1Attention, **SINKS)
    batch = plain(12, 12)
    with torch.no_grad():
        without = batch.forward(model)
    wanted = batch.forward(model)
    assert wanted.requires_grad
    assert torch.equal(wanted, without)


def test_every_parameter_learns_and_two_steps_give_equal_bits(gpt):
    model = gpt(core_attention=backend.Tka1Attention, **SINKS)
    first = plain(12, 12).train(model)[1]
    model.zero_grad(set_to_none=True)
    second = plain(12, 12).train(model)[1]
    assert any("softmax_offset" in name for name in first)
    for name, grad in first.items():
        assert torch.equal(grad, second[name]), name
        assert grad.any(), name
