"""TKA-1 as vLLM's attention backend: real engines, their own pages and batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import tracekit
from tests.engines_vllm.tiny_engine import PAGE, dense, generate
from tracekit.engines.vllm_backend import Tka1Impl
from tracekit.engines.vllm_points import attention_layers, runner_of
from tracekit.errors import InvalidCall, Unsupported
from tracekit.model import Bits, DType, Mode, Origin
from tracekit.providers.base import Launch
from tracekit.providers.portable import Tka1
from tracekit.recorder.api import record
from tracekit.verdict import Status


def rerun(calls):
    """TKA-1 on the logical rows gives O and LSE of the run."""
    for call in calls:
        (answer,) = Tka1().run(Launch((call,))).tensors
        assert call.out.origin is call.lse.origin is Origin.EXECUTED
        assert call.provenance.executed == Tka1().identity()
        assert answer.out.same(call.out.bits), (call.layer, call.step)
        assert answer.lse.same(call.lse.bits), (call.layer, call.step)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_what_the_engine_computed_is_tka1(name, request, run, prompt):
    """Chunked prefill, mixed batches, GQA, decode; with gpt-oss sinks and a window whose pages come again."""
    llm = request.getfixturevalue(f"{name}_tka1")
    prompts = [prompt(100, 1), prompt(7, 2), prompt(300, 3)]
    llm.reset_prefix_cache()
    plain = generate(llm, prompts, 6)
    got = run(llm, prompts, 6)

    assert got.tokens == plain
    assert got.session.problems == []
    assert all(line.complete and line.recorded == 2 for line in got.recording.ledger)
    rerun(got.calls)
    # The same input in vLLM's own kernel has other bits: what was compared above is no kernel but TKA-1.
    own = run(request.getfixturevalue(name), prompts, 1).calls[0]
    assert own.q.same(got.calls[0].q)
    assert not own.out.bits.same(got.calls[0].out.bits)


def test_a_prefix_hit_is_read_from_its_pages(qwen3_tka1, run, prompt):
    prefix = prompt(80, 6)
    run(qwen3_tka1, [prefix], 2)
    warm = run(qwen3_tka1, [prefix[:70] + prompt(20, 7)], 2, keep_cache=True)
    assert warm.of(1)[0].rows.positions.tolist() == list(range(2 * PAGE, 90))
    assert dense(warm.of(1)[0]).first == 0
    rerun(warm.calls)


def test_preempted_rows_are_computed_again_by_tka1(qwen3_tka1_cramped, run, prompt):
    got = run(qwen3_tka1_cramped, [prompt(90, 1), prompt(60, 2)], 90)
    assert any(call.mode is Mode.RECOMPUTE for call in got.calls)
    rerun(got.calls)


def test_an_fp8_cache_is_decoded_exactly(qwen3_tka1_fp8, run, prompt):
    got = run(qwen3_tka1_fp8, [prompt(70, 1), prompt(9, 2)], 3)
    assert got.session.problems == []
    for call in got.calls:
        exact = Bits(call.launch.arrays["k_storage"], DType.FLOAT8_E4M3FN).to_float32()
        rows = np.concatenate([dense(call, i).keys.to_float32() for i in range(len(call.rows.requests))])
        assert np.array_equal(rows, exact)
    rerun(got.calls)


def test_recorded_is_held_by_tka1_from_the_file(gpt_oss_tka1, prompt, tmp_path):
    path = tmp_path / "run.h5"
    gpt_oss_tka1.reset_prefix_cache()
    with record(path, engine="vllm", llm=gpt_oss_tka1):
        generate(gpt_oss_tka1, [prompt(70, 1), prompt(7, 2)], 3)
    assert tracekit.verify(path) == []
    report = tracekit.replay(path, claims=["recorded", "page-ids", "chunks", "decode"])
    assert {v.provider for v in report.verdicts} == {"tka1"}
    assert {v.status for v in report.verdicts} == {Status.HELD}


def test_a_table_that_names_one_page_twice_is_refused(qwen3_tka1, monkeypatch, prompt):
    """The check can fail: a kernel that trusts its table would read one row for another."""
    layer = next(iter(attention_layers(runner_of(qwen3_tka1)).values()))
    right, rules = layer.impl.forward, []

    def forward(owner, q, k, v, cache, metadata, output, **kwargs):
        table = metadata.block_table.clone()
        table[:, 1] = table[:, 0]
        with pytest.raises(InvalidCall) as caught:
            right(owner, q, k, v, cache, replace(metadata, block_table=table), output, **kwargs)
        rules.append(caught.value.rule)
        # The engine goes on: one that is left in the middle of a request would wait for it in later tests.
        return right(owner, q, k, v, cache, metadata, output, **kwargs)

    monkeypatch.setattr(layer.impl, "forward", forward, raising=False)
    qwen3_tka1.reset_prefix_cache()
    generate(qwen3_tka1, [prompt(60, 1)], 1)
    assert rules == ["C-PAGE-TWICE"]


def test_off_means_off(qwen3, qwen3_tka1):
    """The engine before, and the registry after: vLLM's own classes, the same objects."""
    assert {type(layer.impl) for layer in attention_layers(runner_of(qwen3)).values()} == {
        CPUAttentionBackendImpl
    }
    assert {type(layer.impl) for layer in attention_layers(runner_of(qwen3_tka1)).values()} == {Tka1Impl}
    assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUAttentionBackend
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alibi_slopes": [1.0, 0.5]}, "uses ALiBi"),
        ({"logits_soft_cap": 30.0}, "caps its scores softly at 30.0"),
        ({"attn_type": "encoder"}, "is encoder attention"),
    ],
)
def test_a_layer_that_it_does_not_compute_is_refused_when_it_is_made(qwen3, changes, words):
    arguments = {
        "num_heads": 2,
        "head_size": 32,
        "scale": 1.0,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    with set_current_vllm_config(runner_of(qwen3).vllm_config):
        Tka1Impl(**arguments)
        with pytest.raises(Unsupported, match=words) as caught:
            Tka1Impl(**arguments | changes)
    assert caught.value.rule == "V-TKA1"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_that_tka1_takes(run, prompt, qwen3_tka1_wide, dtype):
    got = run(qwen3_tka1_wide[dtype], [prompt(40, 1), prompt(7, 2)], 3)
    assert got.session.problems == []
    assert {call.dtype.value for call in got.calls} == {dtype}
    rerun(got.calls)


def test_a_dtype_that_tka1_does_not_take_is_refused_when_a_layer_is_made(qwen3, monkeypatch):
    config = runner_of(qwen3).vllm_config
    monkeypatch.setattr(config.model_config, "dtype", torch.float64)
    with (
        set_current_vllm_config(config),
        pytest.raises(Unsupported, match=r"runs in torch\.float64") as caught,
    ):
        Tka1Impl(2, 32, 1.0, 1, None, None, "auto")
    assert caught.value.rule == "V-TKA1"
