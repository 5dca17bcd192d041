"""Recording vLLM: the calls hold what its kernel read and wrote, and its tokens stay the same."""

import functools
from collections import defaultdict

import numpy as np
import pytest
import torch

from tests.engines_vllm.tiny_engine import CHUNK, PAGE, dense, generate
from tracekit.compare import Roundings, compare_envelope, envelope
from tracekit.engines import tiny
from tracekit.engines.vllm_points import attention_layers, runner_of
from tracekit.model import Mode, Origin, RequestKey, Tag
from tracekit.providers.base import Launch
from tracekit.providers.vllm_cpu import VllmCpu
from tracekit.recorder.api import record

ENGINES = ["qwen3", "gpt_oss"]


def bits(tensor):
    return tensor.detach().contiguous().view(torch.int16).numpy().view(np.uint16).copy()


@pytest.fixture
def arguments(monkeypatch):
    """Take each layer's own arguments, by layer number, where the engine hands them over."""

    def spy(llm):
        taken = defaultdict(list)
        for number, layer in enumerate(attention_layers(runner_of(llm)).values()):

            @functools.wraps(layer.impl.forward)
            def forward(owner, q, k, v, cache, metadata, output, _n=number, _f=layer.impl.forward, **kwargs):
                result = _f(owner, q, k, v, cache, metadata, output, **kwargs)
                taken[_n].append(tuple(bits(t) for t in (q, k, v, output)))
                return result

            monkeypatch.setattr(layer.impl, "forward", forward, raising=False)
        return taken

    return spy


def assert_arguments(got, taken):
    """Q, O, and the rows of K and V that a step wrote are the arguments, bit for bit."""
    for layer, steps in taken.items():
        calls = got.of(layer)
        assert len(calls) == len(steps)
        for call, (q, k, v, out) in zip(calls, steps, strict=True):
            rows = call.num_rows
            assert np.array_equal(call.q.data, q[:rows])
            assert np.array_equal(call.out.bits.data.reshape(rows, -1), out[:rows].reshape(rows, -1))
            for index in range(len(call.rows.requests)):
                mine = call.rows.request == index
                held = dense(call, index)
                at = call.rows.positions[mine] - held.first
                assert np.array_equal(held.keys.data[at], k[:rows][mine])
                assert np.array_equal(held.values.data[at], v[:rows][mine])


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_the_same_and_calls_are_the_engines_own_bits(name, request, run, prompt, arguments):
    """Chunked prefill, mixed batches and decode."""
    llm = request.getfixturevalue(name)
    prompts = [prompt(100, 1), prompt(7, 2), prompt(33, 3)]
    llm.reset_prefix_cache()
    plain = generate(llm, prompts, 6)
    taken = arguments(llm)
    got = run(llm, prompts, 6)

    assert got.tokens == plain
    assert got.session.problems == []
    assert all(line.complete and line.recorded == 2 for line in got.recording.ledger)
    assert_arguments(got, taken)
    for request_, tokens, generated in zip(got.recording.requests, prompts, got.tokens, strict=True):
        assert request_.key == RequestKey.of_prompt(tokens)
        assert request_.token_ids.tolist() == tokens + generated[:-1]
        assert request_.prompt_length == len(tokens)


@pytest.mark.parametrize("name", ENGINES)
def test_out_lies_inside_its_envelope(name, request, run, prompt):
    got = run(request.getfixturevalue(name), [prompt(70, 4), prompt(20, 5)], 3)
    for call in got.calls:
        conventions = call.conventions
        bound = envelope(call, Roundings(conventions.score_dtype, conventions.probability_dtype))
        verdict = compare_envelope(call, bound, call.out.bits, None)
        assert verdict.inside.compared.elements
        assert verdict.outside.first is None, (call.layer, call.step, verdict.outside.first)
        assert call.lse.origin is Origin.DERIVED
        assert (call.sink is not None) == (name == "gpt_oss")


def test_a_prompt_in_chunks_beside_a_decoding_request(qwen3, run, prompt):
    got = run(qwen3, [prompt(7, 2), prompt(100, 1)], 6)
    first, second = got.of(0)[:2]

    assert first.num_rows == CHUNK
    assert {len(call.rows.requests) for call in (first, second)} == {2}
    assert np.bincount(second.rows.request).tolist() == [1, 100 - (CHUNK - 7)]
    assert dense(second, 1).count == 100
    assert [call.mode for call in got.of(0)[:3]] == [Mode.PREFILL, Mode.PREFILL, Mode.DECODE]


def test_a_prefix_hit_is_consumed_and_not_computed(qwen3, run, prompt):
    prefix = prompt(80, 6)
    cold = run(qwen3, [prefix], 2)
    warm = run(qwen3, [prefix[:70] + prompt(20, 7)], 2, keep_cache=True)
    call = warm.of(1)[0]

    assert call.rows.positions.tolist() == list(range(2 * PAGE, 90))
    assert dense(call).first == 0
    written = [dense(c) for c in cold.of(1)][-1]
    assert dense(call).keys.part(slice(70)).same(written.keys.part(slice(70)))
    assert warm.recording.requests[0].token_ids.size == 91
    assert warm.session.problems == []


def test_a_preempted_request_goes_on_as_the_same_request(qwen3_cramped, run, prompt):
    """Its rows are computed again, over other pages. Where the second time gives other bits (a row that was
    decoded alone is now one of many), a new generation of KV rows begins: what each call read stays true."""
    prompts = [prompt(90, 1), prompt(60, 2)]
    got = run(qwen3_cramped, prompts, 90)

    assert got.session.problems == []
    assert all(line.complete for line in got.recording.ledger)
    assert [r.key for r in got.recording.requests] == [RequestKey.of_prompt(p) for p in prompts]
    again = [call for call in got.of(0) if call.mode is Mode.RECOMPUTE]
    assert again
    assert again[0].rows.positions.min() == 0
    rerun = VllmCpu()
    for call in again:
        assert rerun.run(Launch((call,))).tensors[0].out.same(call.out.bits)
    for request_, tokens, generated in zip(got.recording.requests, prompts, got.tokens, strict=True):
        assert request_.token_ids.tolist() == tokens + generated[:-1]


def test_several_samples_of_one_prompt_are_requests_with_ordinals(qwen3, run, prompt):
    tokens = prompt(12, 8)
    got = run(qwen3, [tokens], 4, sampling={"n": 3, "temperature": 1.0, "seed": 5})

    assert sorted(r.key for r in got.recording.requests) == [
        RequestKey.of_prompt(tokens, n) for n in range(3)
    ]
    assert sorted(r.token_ids[12:].tolist() for r in got.recording.requests) == sorted(
        sample[:-1] for sample in got.tokens
    )


def test_a_sliding_window_reads_no_page_that_was_used_again(gpt_oss, run, prompt, arguments):
    """vLLM gives the pages behind the window to later rows; their table entries then name other rows."""
    taken = arguments(gpt_oss)
    got = run(gpt_oss, [prompt(300, 9)], 2)
    window, full = got.of(0)[-1], got.of(1)[-1]

    (table,) = window.launch.block_tables
    assert np.unique(table).size < table.size
    assert dense(window).first == 300 - tiny.WINDOW + 1
    assert dense(window).count == tiny.WINDOW
    assert dense(full).count == 301
    assert_arguments(got, taken)


def test_filters_leave_out_layers_and_steps(qwen3, run, prompt):
    got = run(qwen3, [prompt(10)], 4, layers=[1], steps=[0, 2])
    assert [(call.layer, call.step) for call in got.calls] == [(1, 0), (1, 2)]
    assert [(line.recorded, line.filtered) for line in got.recording.ledger] == [
        (1, 1),
        (0, 2),
        (1, 1),
        (0, 2),
    ]


def test_a_profiling_run_is_tagged_and_not_recorded(qwen3, prompt):
    written = []
    with record("x.h5", llm=qwen3, write=lambda *args: written.append(args)) as session:
        runner_of(qwen3)._dummy_run(8)
        generate(qwen3, [prompt(5)], 2)
    _, recording, calls = written[0]
    other, *steps = recording.ledger
    assert (other.tag, other.expected, other.fired, other.recorded) == (Tag.WARMUP, 2, 2, 0)
    assert [line.step for line in steps] == [0, 1]
    assert {line.tag for line in steps} == {Tag.NORMAL}
    assert len(calls) == 4
    assert session.problems == []


def test_off_means_off(qwen3, run, prompt):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    originals = GPUModelRunner.execute_model, CPUAttentionBackendImpl.forward
    run(qwen3, [prompt(5)], 2)

    assert (GPUModelRunner.execute_model, CPUAttentionBackendImpl.forward) == originals
    assert "execute_model" not in vars(runner_of(qwen3))
    assert all("forward" not in vars(layer.impl) for layer in attention_layers(runner_of(qwen3)).values())
