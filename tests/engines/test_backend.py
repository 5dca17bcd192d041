"""`attn_implementation="tracekit"`: the model runs on TKA-1."""

import numpy as np
import pytest
import torch

from tracekit.engines.driver import greedy
from tracekit.errors import Unsupported
from tracekit.model import KVFamily, Origin
from tracekit.providers.base import Launch
from tracekit.providers.portable import Tka1


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_the_trace_of_a_run_on_tka1_is_tka1(name, request, recorded, prompt):
    """Prefill, decode past the window, left padding, sinks: TKA-1 run again gives O and LSE of the run."""
    model = request.getfixturevalue(name)
    model.set_attn_implementation("tracekit")
    prompts = [prompt(5, 1), prompt(140, 2)]
    tokens = []
    got = recorded(model, lambda m: tokens.append(greedy(m, prompts, 5)))

    assert tokens == [greedy(model, prompts, 5)]
    assert got.session.problems == []
    for call in got.calls:
        answer = Tka1().run(Launch((call,)))
        assert call.out.origin is call.lse.origin is Origin.EXECUTED
        assert call.provenance.executed == answer.executed
        assert answer.tensors[0].out.same(call.out.bits)
        assert answer.tensors[0].lse.same(call.lse.bits)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_padding_changes_no_bit_of_layer_0(name, request, recorded, prompt):
    model = request.getfixturevalue(name)
    model.set_attn_implementation("tracekit")
    short = prompt(20, 1)
    alone = recorded(model, lambda m: greedy(m, [short], 1)).at(layer=0, step=0)
    padded = recorded(model, lambda m: greedy(m, [short, prompt(150, 2)], 1)).at(layer=0, step=0)
    mine = padded.take(np.flatnonzero(padded.rows.request == 0))

    key = alone.rows.requests[0]
    assert mine.q.same(alone.q)
    assert mine.kv[key][KVFamily.DENSE].keys.same(alone.kv[key][KVFamily.DENSE].keys)
    assert mine.out.bits.same(alone.out.bits)


def test_padding_rows_answer_zero(qwen3, prompt):
    qwen3.set_attn_implementation("tracekit")
    seen = []
    projection = qwen3.model.layers[0].self_attn.o_proj
    hook = projection.register_forward_pre_hook(lambda m, args: seen.append(args[0].clone()))
    ids = torch.tensor([[0, 0, *prompt(4)]])
    with torch.no_grad():
        qwen3(ids, attention_mask=(ids > 0).long())
    hook.remove()

    assert not seen[0][0, :2].view(torch.int16).any()
    assert seen[0][0, 2:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_that_tka1_takes(recorded, prompt, dtype):
    """The bits of O are those of TKA-1 in the dtype of the model, and not of bf16 operands."""
    from tracekit.engines import tiny

    model = tiny.build("tiny-qwen3").to(dtype)
    model.set_attn_implementation("tracekit")
    got = recorded(model, lambda m: greedy(m, [prompt(9)], 2))
    assert got.session.problems == []
    for call in got.calls:
        assert call.dtype.value == str(dtype).removeprefix("torch.")
        (answer,) = Tka1().run(Launch((call,))).tensors
        assert answer.out.same(call.out.bits)
        assert answer.lse.same(call.lse.bits)


def test_a_dtype_that_tka1_does_not_take(qwen3, prompt):
    from tracekit.engines import tiny

    model = tiny.build("tiny-qwen3").double()
    model.set_attn_implementation("tracekit")
    with (
        torch.no_grad(),
        pytest.raises(Unsupported, match="float64 operands; bfloat16, float16, float32 are"),
    ):
        model(torch.tensor([prompt(4)]))


def test_no_gradient_is_given_silently(qwen3, prompt):
    qwen3.set_attn_implementation("tracekit")
    with pytest.raises(Unsupported, match="wants gradients"):
        qwen3(torch.tensor([prompt(4)]))


def test_a_foreign_mask(qwen3, prompt):
    qwen3.set_attn_implementation("tracekit")
    with torch.no_grad(), pytest.raises(Unsupported, match="mask made elsewhere"):
        qwen3(torch.tensor([prompt(4)]), attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
