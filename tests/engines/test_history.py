"""Histories of real generations: legal as they are; each planted violation has its code and its place."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import tracekit
from tracekit.cli.main import run
from tracekit.engines.driver import greedy
from tracekit.gate.recorded import Legality, judge
from tracekit.model import KVFamily, KVRows
from tracekit.model.events import (
    Adopt,
    Fence,
    Finish,
    Fork,
    GateMode,
    Migrate,
    NewWeights,
    Preempt,
    ResetCache,
    Rollback,
    Sleep,
    Wake,
)
from tracekit.model.history import Pass
from tracekit.recorder.api import CaptureIncomplete
from tracekit.store import write_trace

STEPS = 6
MODELS = {"qwen3": (20, 13), "gpt_oss": (20, 13), "deepseek_v4": (126,)}
"""Prompts of each; DeepSeek-V4 decodes across 127 (the first C128 row) and 128 (the window drops row 0)."""


@pytest.fixture(scope="module", params=MODELS)
def got(request, _models, recorded, prompt):
    model = _models["tiny-" + request.param.replace("_", "-")]
    model.set_attn_implementation("sdpa" if request.param == "qwen3" else "eager")
    prompts = [prompt(length, seed) for seed, length in enumerate(MODELS[request.param])]
    return recorded(model, lambda m: greedy(m, prompts, STEPS))


def test_a_generation_is_legal_and_every_call_is_proved(got):
    judgement = judge(got.recording, got.calls)
    assert judgement.status is Legality.LEGAL
    assert (judgement.entries, judgement.calls, judgement.assumed) == (STEPS, len(got.calls), 0)
    assert [entry.rows[0][1:4] for entry in got.recording.history][:3] == [
        (0, entry_end(got), GateMode.PREFILL),
        (entry_end(got), entry_end(got) + 1, GateMode.EAGER),
        (entry_end(got) + 1, entry_end(got) + 2, GateMode.EAGER),
    ]


def entry_end(got):
    return got.recording.requests[0].prompt_length


# planted violations: what is changed, the code, and the entry that is refused (None: the end)


def insert(at, *events):
    return lambda history, calls: ((*history[:at], *events, *history[at:]), calls)


def change(at, **fields):
    return lambda history, calls: ((*history[:at], replace(history[at], **fields), *history[at + 1 :]), calls)


def without(step):
    return lambda history, calls: (
        tuple(entry for entry in history if entry.step != step),
        [call for call in calls if call.step != step],
    )


def twice(step):
    return lambda history, calls: ((*history[: step + 1], *history[step:]), calls)


def first_is_decode(history, calls):
    rows = tuple(row._replace(mode=GateMode.EAGER) for row in history[0].rows)
    return change(0, rows=rows)(history, calls)


def newer_weights(history, calls):
    passes = [replace(entry, model_version=1) if entry.step >= 3 else entry for entry in history]
    return insert(3, NewWeights(1))(tuple(passes), calls)


def kv_of(step, **fields):
    """Other KV fields of one call of a step."""

    def changed(history, calls):
        found = []
        for call in calls:
            if call.step == step and call.layer == 1:
                kv = {
                    key: {family: replace(rows, **fields) for family, rows in families.items()}
                    for key, families in call.kv.items()
                }
                call = call.with_kv(kv)
            found.append(call)
        return history, found

    return changed


def all_generations(history, calls):
    """Everything under cache version 1, but for one read of version 0."""
    for step in range(STEPS):
        for layer in range(3):
            if (step, layer) != (4, 1):
                calls = with_generation(calls, step, layer, 1)
    return history, calls


def with_generation(calls, step, layer, generation):
    return [
        call.with_kv(
            {k: {f: replace(r, generation=generation) for f, r in kv.items()} for k, kv in call.kv.items()}
        )
        if (call.step, call.layer) == (step, layer)
        else call
        for call in calls
    ]


def a_layer_is_missing(history, calls):
    return history, [call for call in calls if (call.step, call.layer) != (3, 1)]


def other_rows(history, calls):
    rows = tuple(row._replace(first=row.first + 1, end=row.end + 1) for row in history[2].rows)
    return change(2, rows=rows)(history, calls)


def a_call_of_nobody(history, calls):
    return history[:-1], calls


PLANTED = {
    "stale KV after a weight update": (newer_weights, "G-KV-MODEL", 4),
    "a launch under older weights": (insert(2, NewWeights(1)), "G-MODEL-STALE", 3),
    "a skipped position": (without(2), "G-POSITION-GAP", 2),
    "a pass twice": (twice(2), "G-TRACE-CALL", 3),
    "a decode before the prefill": (first_is_decode, "G-DECODE-FIRST", 0),
    "a cache version that nobody wrote": (kv_of(3, generation=1), "G-CACHE-NEWER", 3),
    "a stale cache version": (all_generations, "G-CACHE-STALE", 4),
    "KV from before a reset": (insert(3, ResetCache(1)), "G-CACHE-RESET", 4),
    "a layer that did not run": (a_layer_is_missing, "G-TRACE-CALL", 3),
    "rows that the call does not have": (other_rows, "G-TRACE-CALL", 2),
    "a call in no pass": (a_call_of_nobody, "G-TRACE-CALL", None),
    "a launch of a sleeping engine": (insert(2, Sleep(True)), "G-ASLEEP", 3),
    "KV that was lost in sleep": (insert(2, Sleep(), Wake()), "G-POSITION-GAP", 4),
    "weights that go back": (insert(1, NewWeights(0)), "G-VERSION-BACK", 1),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_refused_with_its_code_and_place(got, name):
    plant, code, at = PLANTED[name]
    history, calls = plant(got.recording.history, got.calls)
    judgement = judge(replace(got.recording, history=history), calls)

    assert (judgement.status, judgement.code) == (Legality.ILLEGAL, code)
    assert judgement.place.get("entry") == at
    assert code in judgement.reason
    if at is not None and isinstance(history[at], Pass):
        assert judgement.place["step"] == history[at].step


def on_request(event, *fields):
    """An event about the first request before pass 3."""

    def planted(history, calls):
        name = history[0].rows[0].request
        return insert(3, event(name, *fields))(history, calls)

    return planted


ABOUT_A_REQUEST = {
    "a row that was dropped is not computed again": (
        lambda h, c: insert(3, Rollback(h[0].rows[0].request, h[2].rows[0].first))(h, c),
        "G-POSITION-GAP",
        4,
    ),
    "a finished request goes on": (on_request(Finish), "G-FINISHED", 4),
    "a preempted request goes on": (on_request(Preempt), "G-POSITION-GAP", 4),
    "rows that nobody wrote": (on_request(Rollback, 4000), "G-AHEAD", 3),
    "a migration to no weights": (on_request(Migrate, 1), "G-MIGRATE", 3),
    "a fork in the place of its parent": (
        lambda h, c: insert(3, Fork(*[h[0].rows[0].request] * 2, 3))(h, c),
        "G-REQUEST-EXISTS",
        3,
    ),
    "a prefix across a weight update": (
        lambda h, c: insert(3, NewWeights(1), Adopt("new", 3, 1, h[0].rows[0].request))(h, c),
        "G-PREFIX-VERSION",
        4,
    ),
}


@pytest.mark.parametrize("name", ABOUT_A_REQUEST)
def test_a_planted_event_about_a_request_is_refused(got, name):
    plant, code, at = ABOUT_A_REQUEST[name]
    history, calls = plant(got.recording.history, got.calls)
    judgement = judge(replace(got.recording, history=history), calls)
    assert (judgement.status, judgement.code) == (Legality.ILLEGAL, code)
    assert judgement.place["entry"] == at


def test_a_window_row_that_is_missing_is_refused(got):
    """One row less at the front of the recent or dense rows of one decode."""
    found = []
    for call in got.calls:
        if (call.step, call.layer) == (3, 1):
            kv = {key: {f: shorter(f, rows) for f, rows in kv.items()} for key, kv in call.kv.items()}
            selection = replace(
                call.selection,
                families={
                    f: part if f not in (KVFamily.DENSE, KVFamily.RECENT) else later(part, kv, f)
                    for f, part in call.selection.families.items()
                },
            )
            call = replace(call, kv=kv, selection=selection, launch=None)
        found.append(call)
    judgement = judge(got.recording, found)
    assert judgement.code == "G-KV-MISSING"
    assert (judgement.place["step"], judgement.place["layer"]) == (3, 1)


def shorter(family, rows):
    if family not in (KVFamily.DENSE, KVFamily.RECENT):
        return rows
    values = None if rows.values is None else rows.values.part(slice(1, None))
    return KVRows(rows.keys.part(slice(1, None)), values, rows.first + 1, rows.generation)


def later(part, kv, family):
    first = np.array([families[family].first for families in kv.values()])
    return type(part)(np.maximum(part.lo, first), part.hi)


def test_filters_leave_a_history_that_can_be_proved(qwen3, recorded, prompt):
    got = recorded(qwen3, lambda m: greedy(m, [prompt(9)], STEPS), layers=[1], steps=[0, 4])
    judgement = judge(got.recording, got.calls)
    assert (judgement.status, judgement.calls, judgement.assumed) == (Legality.LEGAL, 2, STEPS - 2)


def test_decoding_on_after_an_optimizer_step_is_not_legal(recorded, prompt):
    """The stale KV of a rollout that goes on while its weights are updated: seen, not planted."""
    from tracekit.engines import tiny

    def rollout(model):
        from transformers import DynamicCache

        from tracekit.engines.driver import cache_argument

        cache = DynamicCache(config=model.config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            ids = torch.tensor([prompt(5) if step == 0 else [7]])
            with torch.no_grad():
                model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
            if step == 1:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()

    got = recorded(tiny.build("tiny-qwen3"), rollout)
    judgement = judge(got.recording, got.calls)
    assert (judgement.code, judgement.place["step"]) == ("G-KV-MODEL", 2)
    assert NewWeights(1) in got.recording.history


def test_training_passes_under_new_weights_are_legal(recorded, prompt):
    from tracekit.engines import tiny

    def train(model):
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for seed in range(2):
            ids = torch.tensor([prompt(6, seed)])
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
        model.eval()

    got = recorded(tiny.build("tiny-qwen3"), train)
    judgement = judge(got.recording, got.calls)
    assert judgement.status is Legality.LEGAL
    assert [type(entry) for entry in got.recording.history] == [Pass, NewWeights, Pass]
    assert got.recording.history[0].rows[0].mode is GateMode.TRAINING


def test_a_forward_that_fails_drops_its_rows(qwen3, recorded, prompt):
    def generate(model):
        greedy(model, [prompt(9)], 2)
        handle = model.model.layers[1].register_forward_pre_hook(fails)
        with pytest.raises(ArithmeticError):
            greedy(model, [prompt(9, 1)], 1)
        handle.remove()

    def fails(*_):
        raise ArithmeticError("planted")

    with pytest.warns(CaptureIncomplete, match="step 2"):
        got = recorded(qwen3, generate)
    assert got.recording.history[-1].failed
    judgement = judge(got.recording, got.calls)
    assert judgement.status is Legality.UNKNOWN
    assert "step 2 lost calls" in judgement.reason


def test_nobody_knows_without_a_history(got):
    judgement = judge(replace(got.recording, history=None), got.calls)
    assert judgement.status is Legality.UNKNOWN
    assert judge(replace(got.recording, history=(Fence(),)), got.calls).code == "G-TRACE-CALL"


# in the file, and asked for by name


@pytest.fixture
def trace(got, tmp_path):
    path = tmp_path / "run.h5"
    write_trace(path, got.recording, got.calls)
    return path


def test_it_is_stored_and_proved_again_from_the_file(got, trace, capsys):
    with tracekit.open(trace) as opened:
        assert opened.recording.history == got.recording.history
    assert tracekit.history(trace).status is Legality.LEGAL
    assert run(["verify", "--history", str(trace)]) == 0
    assert "history legal: 6 entries" in capsys.readouterr().out
    assert run(["inspect", str(trace)]) == 0
    assert "6 entries" in capsys.readouterr().out


def test_an_illegal_history_is_told_and_ends_with_1(got, tmp_path, capsys):
    path = tmp_path / "stale.h5"
    history, calls = newer_weights(got.recording.history, got.calls)
    write_trace(path, replace(got.recording, history=history), calls)

    assert run(["verify", str(path)]) == 0  # the file is sound
    capsys.readouterr()
    assert run(["verify", "--history", "--json", str(path)]) == 1
    told = json.loads(capsys.readouterr().out)["histories"][str(path)]
    assert (told["status"], told["code"], told["place"]["step"]) == ("illegal", "G-KV-MODEL", 3)
    assert run(["replay", str(path), "--provider", "tka1", "--claim", "rerun"]) == 1
    assert "history ILLEGAL G-KV-MODEL at entry 4, step 3" in capsys.readouterr().out


def test_an_unknown_history_is_never_legal(got, tmp_path, capsys):
    path = tmp_path / "unknown.h5"
    write_trace(path, replace(got.recording, history=None), got.calls)
    assert run(["verify", "--history", str(path)]) == 3
    assert "history unknown: no history was recorded" in capsys.readouterr().out
    assert run(["inspect", str(path)]) == 0
    assert "nobody knows" in capsys.readouterr().out
