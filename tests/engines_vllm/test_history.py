"""Histories of a real vLLM: legal as they are; each planted violation has its code and its place."""

from dataclasses import replace

import pytest

from tests.engines_vllm.histories import events, legal, other_weights, passes, recorded_program
from tests.engines_vllm.tiny_engine import PAGE, generate
from tracekit.gate.recorded import Legality, judge
from tracekit.model.events import (
    Adopt,
    Evict,
    Finish,
    Fork,
    GateMode,
    NewWeights,
    Preempt,
    ResetCache,
)
from tracekit.model.history import Pass

# histories that are legal


def test_a_chunk_of_a_prompt_beside_rows_that_are_decoded(qwen3, run, prompt):
    history = legal(run(qwen3, [prompt(7, 2), prompt(100, 1)], 6))
    assert [[row.mode for row in entry.rows] for entry in passes(history)[:3]] == [
        [GateMode.PREFILL, GateMode.PREFILL],
        [GateMode.EAGER, GateMode.PREFILL],
        [GateMode.EAGER, GateMode.EAGER],
    ]


def test_a_prefix_hit_adopts_from_the_request_that_wrote_it(qwen3, prompt):
    prefix = prompt(80, 6)

    def program(llm):
        generate(llm, [prefix], 2)
        generate(llm, [prefix[:70] + prompt(20, 7)], 2)

    history = legal(recorded_program(qwen3, program))
    first, second = dict.fromkeys(row.request for entry in passes(history) for row in entry.rows)
    assert events(history, Adopt) == [Adopt(second, 2 * PAGE, 0, first)]
    assert events(history, Finish) == [Finish(first)]


def test_samples_of_one_prompt_adopt_rows_that_are_computed_in_the_same_launch(qwen3, run, prompt):
    """vLLM forks nothing: the samples hit the prefix that the first of them is about to write."""
    got = run(qwen3, [prompt(40, 8)], 3, sampling={"n": 3, "temperature": 1.0, "seed": 5})
    history = legal(got)
    assert events(history, Fork) == []
    assert [adopt.at for adopt in events(history, Adopt)] == [PAGE, PAGE]
    assert len({adopt.source for adopt in events(history, Adopt)}) == 1
    assert [entry.step for entry in passes(history)][:3] == [0, 0, 1]
    assert len(got.calls) == 2 * 3


def test_a_preempted_request_computes_its_rows_again_in_a_new_generation(qwen3_cramped, run, prompt):
    history = legal(run(qwen3_cramped, [prompt(90, 1), prompt(60, 2)], 90))
    (preempt,) = events(history, Preempt)
    at = history.index(preempt)
    mine = [row for entry in passes(history[at:]) for row in entry.rows if row.request == preempt.request]
    assert (mine[0].first, mine[0].mode) == (0, GateMode.RECOMPUTE)
    assert {row.cache_version for row in mine} == {1}


def test_a_preempted_request_finds_its_own_prefix_again(qwen3_shared, run, prompt):
    history = legal(run(qwen3_shared, [prompt(90, 1), prompt(60, 2), [*prompt(90, 1)[:70], 3, 4]], 60))
    preempted = {event.request for event in events(history, Preempt)}
    assert any(
        adopt.request in preempted and adopt.source == adopt.request for adopt in events(history, Adopt)
    )


def test_a_request_whose_pages_are_handed_out_again_is_evicted(qwen3_shared, prompt):
    def program(llm):
        for seed in range(3):
            generate(llm, [prompt(150, seed)], 2)

    history = legal(recorded_program(qwen3_shared, program))
    first = passes(history)[0].rows[0].request
    assert Evict(first) in history
    assert history.index(Evict(first)) > history.index(Finish(first))


@pytest.mark.parametrize("name", ["qwen3_tka1", "gpt_oss", "gpt_oss_tka1", "qwen3_tka1_fp8"])
def test_other_kernels_windows_and_caches(name, request, run, prompt):
    """gpt-oss gives the pages behind its window to later rows."""
    legal(run(request.getfixturevalue(name), [prompt(150, 9), prompt(9, 2)], 3))


def test_new_weights_and_an_emptied_cache(qwen3, prompt):
    def program(llm):
        generate(llm, [prompt(70, 1)], 2)
        other_weights(llm, 1.5)
        assert llm.reset_prefix_cache()
        generate(llm, [prompt(70, 1)], 2)

    history = legal(recorded_program(qwen3, program))
    other_weights(qwen3, 1.0)
    assert [type(event) for event in history if not isinstance(event, Pass)] == [
        NewWeights,
        ResetCache,
        Finish,
    ]
    after = passes(history)[-1]
    assert (after.model_version, after.rows[0].cache_version) == (1, 1)


def test_a_cache_that_is_not_emptied_is_not_told(qwen3, prompt):
    """vLLM keeps the cache while a request runs, and says so."""

    def program(llm):
        start(llm, prompt(40, 3))
        llm.llm_engine.step()
        assert not llm.reset_prefix_cache()
        drain(llm)

    assert events(legal(recorded_program(qwen3, program)), ResetCache) == []


def test_running_requests_are_preempted_for_new_weights(qwen3, prompt):
    """Their rows come again under other weights: that is a prefill, no recompute."""

    def program(llm):
        start(llm, prompt(40, 3))
        for _ in range(3):
            llm.llm_engine.step()
        other_weights(llm, 1.5)
        assert llm.reset_prefix_cache(reset_running_requests=True)
        drain(llm)

    history = legal(recorded_program(qwen3, program))
    other_weights(qwen3, 1.0)
    at = history.index(events(history, Preempt)[0])
    assert passes(history[at:])[0].rows[0][1:4] == (0, 43, GateMode.PREFILL)


def start(llm, tokens, max_tokens=6):
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True)
    llm.llm_engine.add_request("0", {"prompt_token_ids": tokens}, sampling)


def drain(llm):
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


# histories that the engine itself makes illegal


def test_a_prefix_of_older_weights_is_found(qwen3, prompt):
    """`reload_weights` alone leaves the prefix cache as it was."""

    def program(llm):
        generate(llm, [prompt(70, 1)], 2)
        other_weights(llm, 1.5)
        generate(llm, [prompt(70, 1)], 2)

    got = recorded_program(qwen3, program)
    other_weights(qwen3, 1.0)
    judgement = judge(got.recording, got.calls)
    assert (judgement.status, judgement.code) == (Legality.ILLEGAL, "G-PREFIX-STALE")
    assert isinstance(got.recording.history[judgement.place["entry"]], Adopt)


def test_decoding_on_under_new_weights_is_found(qwen3, prompt):
    def program(llm):
        start(llm, prompt(40, 3))
        llm.llm_engine.step()
        other_weights(llm, 1.5)
        drain(llm)

    got = recorded_program(qwen3, program)
    other_weights(qwen3, 1.0)
    judgement = judge(got.recording, got.calls)
    assert (judgement.code, judgement.place["step"]) == ("G-KV-MODEL", 1)


def test_a_cache_that_says_it_is_empty_and_is_not(qwen3, prompt, monkeypatch):
    manager = qwen3.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager

    def program(llm):
        generate(llm, [prompt(70, 1)], 2)
        assert llm.reset_prefix_cache()
        generate(llm, [prompt(70, 1)], 2)

    qwen3.reset_prefix_cache()
    monkeypatch.setattr(manager, "reset_prefix_cache", lambda: True)
    got = recorded_program(qwen3, program)
    assert judge(got.recording, got.calls).code == "G-CACHE-RESET"


# histories that nobody knows


def test_a_prefix_from_before_the_recording_is_unknown(qwen3, run, prompt):
    generate(qwen3, [prompt(70, 1)], 2)
    got = run(qwen3, [prompt(70, 1)], 2, keep_cache=True)
    unknown(got, "64 rows of the prefix cache that no single request of the recording wrote")


def test_a_prefix_behind_the_window_of_its_giver_is_unknown(gpt_oss, prompt):
    def program(llm):
        generate(llm, [prompt(80, 1)], 3)
        generate(llm, [prompt(80, 1)], 3)

    unknown(recorded_program(gpt_oss, program), "behind the sliding window of the request that wrote them")


def test_a_function_on_the_worker_is_unknown(qwen3, prompt):
    def program(llm):
        generate(llm, [prompt(9)], 2)
        llm.apply_model(lambda model: None)

    unknown(recorded_program(qwen3, program), "the worker ran apply_model")


def test_a_request_from_before_the_recording_is_unknown(qwen3, prompt):
    start(qwen3, prompt(9, 3))
    qwen3.llm_engine.step()
    unknown(recorded_program(qwen3, drain, reset=False), "begins with 9 rows")


def test_an_engine_whose_scheduler_is_elsewhere_is_unknown(qwen3, run, prompt, monkeypatch):
    from tracekit.engines import vllm as adapter

    monkeypatch.setattr(adapter, "core_of", lambda core, runner: None)
    unknown(run(qwen3, [prompt(9)], 2), "runs in another process")


def test_a_step_that_cannot_be_read_is_unknown(qwen3, run, prompt, monkeypatch):
    from tracekit.engines.vllm_step import Requests
    from tracekit.recorder.api import CaptureIncomplete

    real, steps = Requests.read, []

    def read(self, runner, scheduled):
        steps.append(scheduled)
        if len(steps) == 2:
            raise ArithmeticError("planted")
        return real(self, runner, scheduled)

    monkeypatch.setattr(Requests, "read", read)
    with pytest.warns(CaptureIncomplete):
        got = run(qwen3, [prompt(9)], 3)
    unknown(got, "step 1 could not be read")


def unknown(got, words):
    judgement = judge(got.recording, got.calls)
    assert judgement.status is Legality.UNKNOWN
    assert judgement.reason.startswith("there is no history: ")
    assert words in judgement.reason


def test_what_is_wrapped_is_there(qwen3):
    """A method of the worker that has another name now would go by unseen."""
    from tracekit.engines.vllm_events import HARMLESS, UPDATES

    worker = qwen3.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    assert [name for name in {*UPDATES, *HARMLESS} if not hasattr(worker, name)] == []


# filters


def test_a_filter_leaves_out_the_launch_after_a_preemption(qwen3_cramped, run, prompt):
    """What was not recorded is taken to have read the generation that its request had then."""
    prompts = [prompt(90, 1), prompt(60, 2)]
    steps = [step for step in range(150) if step % 5 == 3]
    got = run(qwen3_cramped, prompts, 90, layers=[1], steps=steps)
    judgement = judge(got.recording, got.calls)
    assert (judgement.status, judgement.calls) == (Legality.LEGAL, len(got.calls))
    assert judgement.assumed > len(got.calls)

    old = tuple(
        replace(entry, rows=tuple(row._replace(cache_version=0) for row in entry.rows))
        if isinstance(entry, Pass)
        else entry
        for entry in got.recording.history
    )
    assert judge(replace(got.recording, history=old), got.calls).code == "G-CACHE-STALE"
