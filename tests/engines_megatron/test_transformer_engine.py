"""Transformer Engine's attention by signature: Megatron's own wrapper, recorded over a module like TE's."""

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from tests.engines_megatron.conftest import Batch, ids, plain
from tests.engines_megatron.te_module import DotProductAttention, te_dot_product_attention
from tracekit.engines import megatron_te
from tracekit.engines import megatron_tiny as tiny
from tracekit.engines.patch import EVIDENCE, UntestedVersion
from tracekit.errors import Unsupported
from tracekit.model import KVFamily

pytestmark = pytest.mark.filterwarnings("ignore::tracekit.recorder.api.CaptureIncomplete")


def te_model(base=DotProductAttention, **options):
    """A model whose core attention is Transformer Engine's, as Megatron makes it."""
    return tiny.gpt(core_attention=te_dot_product_attention(base), **options)


def test_scale_window_sink_and_evidence_are_recorded(recorded):
    """Megatron hands window, scale and sink on; the module is asked for what it holds."""
    model = te_model(softmax_type="learnable", window_size=(4, 0), kv_channels=32)
    with pytest.warns(UntestedVersion, match="TEDotProductAttention: by signature, untested on hardware"):
        got = recorded(model, plain(12, 12).forward)
    assert got.session.problems == []
    assert got.recording.notes["evidence"] == f"TEDotProductAttention: {EVIDENCE}"
    assert len(got.calls) == 2
    for call in got.calls:
        assert call.provenance.executed.kernel == "transformer_engine.dot_product"
        assert call.provenance.details["evidence"] == EVIDENCE
        assert np.float32(call.conventions.scale) == np.float32(32**-0.5)
        assert call.conventions.window == 5
        read = call.selection.families[KVFamily.DENSE]
        assert (read.hi - read.lo).tolist() == [min(p + 1, 5) for p in call.rows.positions.tolist()]
        offset = model.decoder.layers[call.layer].self_attention.core_attention.softmax_offset
        assert np.array_equal(call.sink.to_float32(), offset.detach().float().numpy())


def test_a_packed_launch_is_recorded(recorded):
    """Megatron passes `causal` on as `padding_causal` of a packed launch."""
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    params = PackedSeqParams("thd", starts, starts, max_seqlen_q=7, max_seqlen_kv=7)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    batch = Batch(torch.tensor([ids(12)]), positions, None, more={"packed_seq_params": params})
    with pytest.warns(UntestedVersion):
        got = recorded(te_model(), batch.forward)
    assert got.session.problems == []
    assert [call.rows.positions.tolist() for call in got.calls] == [[*range(5), *range(7)]] * 2


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_that_means_one_row_more_or_less_is_refused(recorded, off):
    """Before anything is kept: the trace would say that other keys were read."""

    class Other(DotProductAttention):
        def attend(self, q, k, v, before):
            return super().attend(q, k, v, before + off)

    with pytest.warns(UntestedVersion), pytest.raises(Unsupported, match=f"it fits a window of {5 + off}"):
        recorded(te_model(Other, window_size=(4, 0)), plain(12).forward)


def test_a_scale_that_means_something_else_is_refused(recorded):
    class Other(DotProductAttention):
        def attend(self, q, k, v, before):
            return super().attend(1.5 * q, k, v, before)

    with pytest.warns(UntestedVersion), pytest.raises(Unsupported, match="no other reading fits"):
        recorded(te_model(Other), plain(12).forward)


def test_a_module_without_its_scale_is_refused_and_runs(recorded):
    """A version that keeps its scale elsewhere: nothing is guessed, and the model goes on."""
    model, batch = te_model(), plain(6)
    for layer in model.decoder.layers:
        core = layer.self_attention.core_attention
        core.attend = lambda q, k, v, _: torch.zeros_like(q).flatten(1)
        for kernel in (core.flash_attention, core.fused_attention, core.unfused_attention):
            del kernel.softmax_scale
    wanted = batch.forward(model)
    told = []
    with pytest.warns(UntestedVersion), pytest.raises(Unsupported, match="hold the scales") as caught:
        recorded(model, lambda m: told.append(batch.forward(m)))
    assert caught.value.rule == "R-NOTHING"
    assert torch.equal(told[0], wanted)


def test_two_scales_in_one_module_are_refused():
    module = te_model().decoder.layers[0].self_attention.core_attention
    module.fused_attention.softmax_scale *= 2
    with pytest.raises(Unsupported, match="where one was expected") as caught:
        megatron_te.scale_of(module)
    assert caught.value.rule == "M-HOOK"


@pytest.mark.parametrize(
    ("kind", "packed", "fine"),
    [
        (AttnMaskType.causal, False, True),
        (AttnMaskType.causal_bottom_right, False, True),
        (AttnMaskType.padding_causal, True, True),
        (AttnMaskType.causal, True, True),
        (AttnMaskType.padding_causal, False, False),
        (AttnMaskType.padding, False, False),
        (AttnMaskType.arbitrary, False, False),
        (AttnMaskType.no_mask, False, False),
        (AttnMaskType.no_mask, True, False),
    ],
)
def test_mask_types(kind, packed, fine):
    """What Transformer Engine reads by its mask type alone, and what needs the mask."""
    module = te_model(window_size=(3, 0)).decoder.layers[0].self_attention.core_attention
    if fine:
        assert megatron_te.window_of(module, {"attn_mask_type": kind}, packed) == 4
        return
    with pytest.raises(Unsupported) as caught:
        megatron_te.window_of(module, {"attn_mask_type": kind}, packed)
    assert caught.value.rule == "M-MASK-TYPE"
