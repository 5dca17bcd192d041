"""`DSAttention` on its fallback: latents, the executed choice, and O against binary64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import tracekit
from tests.engines_megatron import sparse_model
from tests.engines_megatron.conftest import dense, padded, plain
from tracekit.compare import Roundings, compare_envelope, envelope
from tracekit.engines import megatron as adapter
from tracekit.engines import megatron_dsa
from tracekit.engines.patch import UntestedVersion
from tracekit.errors import Unsupported
from tracekit.model import Lists, scale_to_bits
from tracekit.providers.torch_tensors import from_torch
from tracekit.recorder.api import CaptureIncomplete, record


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def model(request):
    return sparse_model.gpt(request.param)


def quietly(batch):
    def forward(model):
        with torch.no_grad():
            return batch.forward(model)

    return forward


def test_o_lies_in_its_envelope_and_values_are_the_start_of_keys(model, recorded):
    got = recorded(model, quietly(plain(20, 20)))
    assert got.session.problems == []
    assert [call.layer for call in got.calls] == [0, 1]
    for call in got.calls:
        held = dense(call)
        assert (held.keys.shape, held.values.shape) == ((20, 1, 48), (20, 1, 32))
        assert np.array_equal(held.keys.data[..., :32], held.values.data)
        assert call.conventions.output_boundary == "latent, before the value projection"
        assert call.provenance.executed.kernel == "megatron.dsa_absorbed"
        declared = call.conventions
        bound = envelope(call, Roundings(declared.score_dtype, declared.probability_dtype))
        found = compare_envelope(call, bound, call.out.bits, None, declared)
        assert found.outside.first is None
        assert found.outside.compared.elements == call.out.bits.size


def test_the_choice_is_the_indexers_and_is_what_was_read(model, recorded):
    got = recorded(model, quietly(plain(20, 20)))
    assert [call.layer for call in got.indexer_calls] == [0, 1]
    for call, indexer in zip(got.calls, got.indexer_calls, strict=True):
        read = call.selection.families["dense"]
        assert isinstance(read, Lists)
        for t, row in enumerate(call.rows.ids):
            chosen = indexer.top_k.row(t)
            assert read.row(t).tolist() == sorted(chosen.tolist())
            assert len(chosen) == min(row.position + 1, 8)
        assert any(indexer.top_k.row(t).tolist() != read.row(t).tolist() for t in range(call.num_rows))


def test_the_model_computes_the_same_and_keeps_its_functions(model, recorded):
    from megatron.core.transformer.experimental_attention_variant import dsa

    names = ("_unfused_absorbed_dsa_fn", "unfused_dsa_fn", "fused_qk_topk_naive")
    before = [getattr(dsa, name) for name in names]
    batch = plain(20, 20)
    wanted = quietly(batch)(model)
    got = recorded(model, quietly(batch))
    assert torch.equal(got.result, wanted)
    assert all(getattr(dsa, name) is original for name, original in zip(names, before, strict=True))


def test_a_trace_of_it_is_replayed(tmp_path):
    model = sparse_model.gpt()
    with record(tmp_path / "run.h5", engine="megatron", model=model):
        quietly(plain(20, 20))(model)
    assert tracekit.verify(tmp_path / "run.h5") == []
    report = tracekit.replay(tmp_path / "run.h5")
    assert report.exit_code == 0
    assert report.find("control", "trace").status is tracekit.Status.BOUNDED
    chunks = report.find("chunks", "indexer-ref")
    assert chunks.status is tracekit.Status.HELD


def test_an_untested_version_shows_its_sparse_attention_first(model, recorded, monkeypatch):
    """The window of versions is moved: latents and choices are asked before they are kept."""
    monkeypatch.setattr(adapter, "engine_version", lambda: "0.99.1")
    with pytest.warns(UntestedVersion):
        got = recorded(model, quietly(plain(20, 20)))
    assert got.session.problems == []
    assert (len(got.calls), len(got.indexer_calls)) == (2, 2)

    with monkeypatch.context() as wrong:
        wrong.setattr(megatron_dsa, "scale_to_bits", lambda scale: scale_to_bits(2 * scale))
        with pytest.warns(UntestedVersion), pytest.raises(Unsupported, match="no other reading fits"):
            recorded(model, quietly(plain(20, 20)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: replace(s, scale_bits=scale_to_bits(1.25)), "scores keys otherwise than it declares"),
        (lambda s: replace(s, scores=None), "shows no scores that could be judged"),
        (lambda s: replace(s, top_k=Lists.of([np.sort(np.r_[s.top_k.row(t)[1:], _left(s, t)]) for t in
            range(s.positions.size)]), scores=None), "leaves out a key that scores above"),
    ],
    ids=["scale", "no scores", "choice"],
)  # fmt: skip
def test_an_indexer_of_an_untested_version_that_does_not_fit_is_cut(
    model, recorded, monkeypatch, change, words
):
    real = adapter.observe_choice
    monkeypatch.setattr(adapter, "engine_version", lambda: "0.99.1")
    monkeypatch.setattr(adapter, "observe_choice", lambda *args: change(real(*args)))
    with pytest.warns(UntestedVersion), pytest.warns(CaptureIncomplete, match=words):
        got = recorded(model, quietly(plain(20, 20)))
    assert (len(got.calls), len(got.indexer_calls)) == (2, 0)
    assert not any(line.complete for line in got.recording.ledger)


def _left(seen, t):
    """The lowest key that row t did not choose, where there is one."""
    return np.setdiff1d(np.arange(seen.positions[t] + 1), seen.top_k.row(t))[:1]


def test_a_function_that_takes_other_arguments_breaks_the_hook_alone(model, recorded, monkeypatch):
    from megatron.core.transformer.experimental_attention_variant import dsa

    original, batch = dsa._unfused_absorbed_dsa_fn, plain(20, 20)
    wanted = quietly(batch)(model)
    monkeypatch.setattr(dsa, "_unfused_absorbed_dsa_fn", lambda *renamed, **more: original(*renamed, **more))
    told = []
    with pytest.raises(Unsupported, match="KeyError"):
        recorded(model, lambda m: told.append(quietly(batch)(m)))
    assert torch.equal(told[0], wanted)


def test_rows_that_read_padding_are_refused(model, recorded):
    """The module makes a causal mask of its own, so a left-padded sequence reads its padding."""
    with pytest.raises(Unsupported, match="chose a key of padding"):
        recorded(model, quietly(padded(20, 9, left=True)))
    got = recorded(model, quietly(padded(20, 9)))
    assert [call.num_rows for call in got.calls] == [29, 29]


def test_the_expanded_form_reads_in_the_order_of_its_choice():
    """Called by itself: no layer of 0.19 builds it without Transformer Engine."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    from tracekit.engines.megatron_dsa import EXPANDED, Ran, observe_sparse
    from tracekit.engines.megatron_step import read_forward

    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, 1, 2, size, generator=random) for size in (8, 8, 4))
    chosen = torch.tensor([[[0, -1, -1], [1, 0, -1], [2, 0, 1], [1, 3, 0], [4, 2, 3], [0, 5, 2]]])
    causal = torch.full((6, 6), -torch.inf).triu(1)
    out = dsa.unfused_dsa_fn(q, k, v, chosen, 0.5, mask=causal)
    batch = plain(6)
    forward = read_forward(
        {"input_ids": batch.tokens, "position_ids": batch.positions, "attention_mask": batch.mask}
    )
    forward.handles = (0,)

    ran = Ran(EXPANDED, dsa.unfused_dsa_fn, (q, k, v, chosen, 0.5), {"mask": causal}, out)

    class Core:
        layer, name, module = 0, "core", object()

    seen = observe_sparse(Core, ran, forward)
    part = seen.selection.families["dense"]
    assert [part.row(t).tolist() for t in range(6)] == [
        [0],
        [1, 0],
        [2, 0, 1],
        [1, 3, 0],
        [4, 2, 3],
        [0, 5, 2],
    ]
    for t in range(6):
        keys = part.row(t)
        scores = torch.einsum("hd,nhd->hn", q[t, 0].double(), k[keys, 0].double()) * 0.5
        wanted = torch.einsum("hn,nhd->hd", scores.softmax(-1), v[keys, 0].double())
        found = seen.out.bits.to_float64()[t]
        assert np.abs(found - wanted.numpy()).max() < 1e-6
    assert np.array_equal(seen.out.bits.data.reshape(6, -1), from_torch(out, "")[0][:, 0])
