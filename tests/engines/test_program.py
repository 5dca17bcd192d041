"""What a recording must not do to the program around it: break it, hold its models, mix its threads."""

import copy
import gc
import pickle
import threading
import weakref
from contextlib import ExitStack

import pytest
import torch

from tracekit.engines import tiny
from tracekit.engines.driver import cache_argument, greedy
from tracekit.engines.patch import Entry, replaced
from tracekit.engines.transformers import attach
from tracekit.gate.recorded import Legality, judge
from tracekit.recorder.api import CaptureIncomplete
from tracekit.recorder.session import Session


def forward(model, ids):
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=True, **{cache_argument(model): cache}).logits


def test_a_forward_of_another_thread_is_refused_and_told(recorded, prompt):
    """The second one begins and ends while the first one is inside its second layer."""
    model = tiny.build("tiny-qwen3")
    first, second = prompt(6), prompt(9, 1)
    expected = forward(model, first), forward(model, second)
    inside, done = threading.Event(), threading.Event()
    main = threading.get_ident()
    found = {}

    def other():
        inside.wait()
        found["second"] = forward(model, second)
        done.set()

    def wait(*_):
        if threading.get_ident() == main and not done.is_set():
            inside.set()
            done.wait()

    def run(model):
        thread = threading.Thread(target=other)
        thread.start()
        handle = model.model.layers[1].register_forward_pre_hook(wait)
        found["first"] = forward(model, first)
        handle.remove()
        thread.join()
        forward(model, first)

    with pytest.warns(CaptureIncomplete, match="one at a time"):
        got = recorded(model, run)
    assert torch.equal(found["first"], expected[0])
    assert torch.equal(found["second"], expected[1])
    lines = got.recording.ledger
    assert [line.complete for line in lines] == [True, False, True]
    assert "another thread's forward" in lines[1].cut
    assert {len(request.token_ids) for request in got.recording.requests} == {6}
    assert [(call.step, call.layer) for call in got.calls] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert judge(got.recording, got.calls).status is Legality.UNKNOWN


def test_a_compiled_forward_runs_and_is_told(recorded, prompt):
    model = tiny.build("tiny-qwen3")
    ids = torch.tensor([prompt(6)])
    with torch.no_grad():
        expected = torch.compile(model, fullgraph=True, backend="eager")(ids, use_cache=False).logits
    torch._dynamo.reset()
    found = []

    def run(model):
        greedy(model, [prompt(5)], 1)
        with torch.no_grad():
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            found.append(compiled(ids, use_cache=False).logits)

    with pytest.warns(CaptureIncomplete, match=r"torch\.compile"):
        got = recorded(model, run)
    torch._dynamo.reset()
    assert torch.equal(found[0], expected)
    assert [line.complete for line in got.recording.ledger] == [True, False]


def test_copies_of_a_model_run_and_are_not_recorded(recorded, prompt):
    model = tiny.build("tiny-qwen3")
    expected = greedy(model, [prompt(5)], 2)

    def run(model):
        greedy(model, [prompt(5)], 1)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert greedy(copied, [prompt(5)], 2) == expected

    got = recorded(model, run)
    assert [line.complete for line in got.recording.ledger] == [True]


def test_a_model_whose_hooks_are_taken_away_is_told(recorded, prompt):
    """Programs that look into models clear all hooks, and so those of the recording."""
    model = tiny.build("tiny-qwen3")

    def run(model):
        forward(model, prompt(6))
        model._forward_pre_hooks.clear()
        model._forward_hooks.clear()
        forward(model, prompt(5))

    with pytest.warns(CaptureIncomplete, match="hooks of the model were taken away"):
        got = recorded(model, run)
    assert [line.complete for line in got.recording.ledger] == [True, False]


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-gpt-oss", "tiny-deepseek-v32"])
def test_a_model_that_is_deleted_is_freed_and_its_history_is_proved(name, prompt):
    """Its weights are read again in the moment of its end."""
    model = tiny.build(name)
    if name != "tiny-qwen3":
        model.set_attn_implementation("eager")
    session = Session()
    with ExitStack() as stack:
        stack.enter_context(attach(session, model=model))
        greedy(model, [prompt(6)], 3)
        gone = [weakref.ref(model), weakref.ref(model.model.layers[1].self_attn), weakref.ref(model.lm_head)]
        del model
        gc.collect()
        assert [reference() for reference in gone] == [None, None, None]
    recording, calls = session.finish()
    assert all(line.complete for line in recording.ledger)
    assert judge(recording, calls).status is Legality.LEGAL


def test_a_write_through_data_is_seen_in_a_model_that_is_deleted(prompt):
    model = tiny.build("tiny-qwen3")
    session = Session()
    with ExitStack() as stack:
        stack.enter_context(attach(session, model=model))
        greedy(model, [prompt(6)], 2)
        model.lm_head.weight.data.mul_(2)
        forward(model, prompt(4))
        del model
        gc.collect()
    assert judge(*session.finish()).status is Legality.UNKNOWN


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_replacements_may_end_in_any_order(order):
    table = {"sdpa": "original"}
    contexts = [replaced(Entry("sdpa", table, "sdpa", lambda old, n=n: f"{old} {n}")) for n in range(3)]
    for context in contexts:
        context.__enter__()
    for number in order:
        context = contexts[number]
        context.__exit__(None, None, None)
        assert table["sdpa"].startswith("original")
    assert table == {"sdpa": "original"}


def test_a_session_that_fails_in_a_hook_does_not_reach_the_engine(prompt, monkeypatch):
    model = tiny.build("tiny-qwen3")
    expected = greedy(model, [prompt(5)], 2)
    session = Session()
    real, calls = session._ledger.close, []

    def fails(step):
        calls.append(step)
        if len(calls) == 2:
            raise MemoryError("planted")
        return real(step)

    monkeypatch.setattr(session._ledger, "close", fails)
    with attach(session, model=model):
        assert greedy(model, [prompt(5)], 3)[0][:2] == expected[0]
    assert "planted" in session.notes["recording"]
    assert not all(line.complete for line in session._ledger.lines)
