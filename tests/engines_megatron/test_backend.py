"""TKA-1 as Megatron's core attention: the same bits whatever stands beside a sequence."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import tracekit
from tests.engines_megatron.conftest import documents, padded, plain
from tracekit.engines import megatron_backend as backend
from tracekit.engines import megatron_tiny as tiny
from tracekit.errors import Unsupported
from tracekit.model import Origin
from tracekit.providers import tka1
from tracekit.providers.base import Launch
from tracekit.providers.portable import Tka1
from tracekit.providers.torch_tensors import from_torch
from tracekit.recorder.api import record

SINKS = {"softmax_type": "learnable"}


@pytest.fixture
def served(gpt):
    return gpt(core_attention=backend.Tka1Attention, **SINKS)


def operands(length, batch=1, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(length, batch, heads, 16, generator=random).bfloat16() for heads in (4, 2, 2)]


def test_the_layer_spec_is_switched_by_one_setting():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    layer = backend.on_tka1(get_gpt_layer_local_spec())
    assert layer.submodules.self_attention.submodules.core_attention is backend.Tka1Attention
    block = get_gpt_decoder_block_spec(tiny.config(torch.bfloat16), use_transformer_engine=False)
    backend.on_tka1(block)
    cores = [one.submodules.self_attention.submodules.core_attention for one in block.layer_specs]
    assert cores == [backend.Tka1Attention] * 2
    with pytest.raises(Unsupported) as caught:
        backend.on_tka1(object())
    assert caught.value.rule == "M-SPEC"


def test_o_is_that_of_tka1_on_the_same_rows():
    q, k, v = operands(9)
    out = backend.attention(q, k, v, sink=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    bits = [np.ascontiguousarray(from_torch(tensor, "")[0][:, 0]) for tensor in (q, k, v)]
    rows = np.arange(9)
    answer = tka1.attention(
        tka1.Inputs(
            q=bits[0],
            request=np.zeros(9, np.int32),
            families=(
                tka1.FamilyInput((bits[1],), (bits[2],), (0,), tka1.Ranges(np.zeros(9, np.int64), rows + 1)),
            ),
            sink=np.array([0.5, -1.0, 2.0, 0.0], np.float32).view(np.uint32),
            scale_bits=int(np.float32(0.25).view(np.uint32)),
        )
    )
    assert np.array_equal(from_torch(out, "")[0][:, 0], answer.out)


def test_company_padding_and_packing_change_no_bit():
    """One sequence alone, padded on either side, beside others, and as the second document of a place."""
    q, k, v = operands(7)
    alone = backend.attention(q, k, v)
    others = operands(12, 2, seed=5)
    for left in (False, True):
        batch = padded(7, 12, left=left)
        at = slice(5, 12) if left else slice(0, 7)
        beside = [other.clone() for other in others]
        for tensor, own in zip(beside, (q, k, v), strict=True):
            tensor[at, 0] = own[:, 0]
        assert torch.equal(backend.attention(*beside, batch.mask)[at, 0], alone[:, 0])
    packed = [torch.cat([other[:5, :1], own]) for other, own in zip(others, (q, k, v), strict=True)]
    assert torch.equal(backend.attention(*packed, documents(5, 7).mask)[5:, 0], alone[:, 0])


def test_a_slot_of_padding_is_zero():
    out = backend.attention(*operands(12, 2), padded(7, 12).mask)
    assert not out[7:, 0].any()
    assert out[:7, 0].abs().sum() > 0


def test_a_window_is_read_from_the_mask_or_given():
    q, k, v = operands(9)
    banded = tiny.causal(9) | torch.ones(9, 9, dtype=torch.bool).tril(-4)
    assert torch.equal(backend.attention(q, k, v, banded), backend.attention(q, k, v, window=4))
    assert not torch.equal(backend.attention(q, k, v, banded), backend.attention(q, k, v))


@pytest.mark.parametrize(
    "batch", [plain(12, 12), padded(12, 5, left=True), documents(5, 7)], ids=["plain", "left", "documents"]
)
def test_a_model_on_tka1_is_recorded_with_its_lse_and_replayed(served, batch, tmp_path):
    with torch.no_grad(), record(tmp_path / "run.h5", engine="megatron", model=served) as session:
        logits = batch.forward(served)
    assert session.problems == []
    with torch.no_grad():
        assert torch.equal(batch.forward(served), logits)
    with tracekit.open(tmp_path / "run.h5") as trace:
        assert {trace.call(i).provenance.executed.kernel for i in range(len(trace))} == {"tka1"}
        assert {trace.call(i).lse.origin for i in range(len(trace))} == {Origin.EXECUTED}
    report = tracekit.replay(tmp_path / "run.h5", provider="tka1", claims="recorded")
    assert report.exit_code == 0
    assert report.find("recorded", "tka1").status is tracekit.Status.HELD


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_that_tka1_takes(gpt, recorded, dtype):
    model = gpt(core_attention=backend.Tka1Attention, dtype=dtype, **SINKS)
    with torch.no_grad():
        got = recorded(model, padded(12, 5, left=True).forward)
    assert got.session.problems == []
    for call in got.calls:
        assert call.dtype.value == str(dtype).removeprefix("torch.")
        (answer,) = Tka1().run(Launch((call,))).tensors
        assert answer.out.same(call.out.bits)
        assert answer.lse.same(call.lse.bits)


def test_packed_launches_run_and_are_recorded(served, recorded):
    """`thd` with padding between sequences: `DotProductAttention` takes none, so only TKA-1 executes."""
    from megatron.core.packed_seq_params import PackedSeqParams

    starts, places = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 8], [0, 6, 12]))
    params = PackedSeqParams("thd", starts, starts, places, places, max_seqlen_q=6, max_seqlen_kv=6)
    batch = replace(plain(12), mask=None, more={"packed_seq_params": params})

    def packed(model):
        with torch.no_grad():
            return batch.forward(model)

    got = recorded(served, packed)
    assert got.session.problems == []
    call = got.calls[0]
    assert [row.position for row in call.rows.ids] == [0, 1, 2, 3, 4, 0, 1, 2]
    tokens = batch.tokens[0].tolist()
    assert call.rows.token_ids.tolist() == tokens[:5] + tokens[6:9]

    with torch.no_grad():
        first = recorded(served, replace(plain(5), tokens=batch.tokens[:, :5]).forward)
    for layer in (0, 1):
        one, alone = got.calls[layer], first.calls[layer]
        mine = np.flatnonzero(one.rows.request == 0)
        assert one.q.take(mine).same(alone.q)
        assert one.out.bits.take(mine).same(alone.out.bits)


def test_documents_that_only_the_mask_tells_apart(served, recorded):
    """TKA-1 numbers rows by documents, the trace by tokens; where they differ nothing is recorded."""
    batch = documents(5, 7)
    batch.positions = torch.arange(12)[None]
    with (
        torch.no_grad(),
        pytest.raises(Unsupported, match="the mask tells other documents apart than position_ids do"),
    ):
        recorded(served, batch.forward)


def test_what_tka1_does_not_take_is_refused(gpt, served):
    double = gpt(core_attention=backend.Tka1Attention, dtype=torch.float64)
    for model, action, why in (
        (double, plain(6).forward, "float64 operands"),
        (
            gpt(core_attention=backend.Tka1Attention, attention_dropout=0.5),
            lambda m: plain(6).forward(m.train()),
            "uses dropout",
        ),
    ):
        with pytest.raises(Unsupported, match=why) as caught:
            action(model)
        assert caught.value.rule == "M-TKA1"


def test_a_checkpoint_of_one_loads_into_the_other(gpt, served):
    assert served.state_dict().keys() == gpt(**SINKS).state_dict().keys()
