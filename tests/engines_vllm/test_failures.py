"""What goes wrong becomes a sentence and a line of the ledger; the engine goes on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.engines_vllm.tiny_engine import generate
from tracekit.canonical.window import window_ranges
from tracekit.engines import vllm as adapter
from tracekit.engines import vllm_call
from tracekit.engines.vllm_points import attention_layers, refuse_runner, runner_of
from tracekit.engines.vllm_prefixes import Prefixes
from tracekit.engines.vllm_step import Requests
from tracekit.errors import ConventionContradicted, Unsupported
from tracekit.model import Bits, DType, KVFamily, Origin, Selection, scale_to_bits
from tracekit.recorder.api import CaptureIncomplete, record
from tracekit.recorder.first_launch import FirstLaunches
from tracekit.recorder.session import Session


def test_a_failing_hook_cuts_the_ledger_and_leaves_the_tokens(qwen3, run, prompt, monkeypatch):
    qwen3.reset_prefix_cache()
    plain = generate(qwen3, [prompt(9)], 3)
    real = vllm_call.observe_call

    def broken(call, step):
        if call.number == 1:
            raise ZeroDivisionError("mine")
        return real(call, step)

    monkeypatch.setattr(adapter, "observe_call", broken)
    with pytest.warns(CaptureIncomplete, match="ZeroDivisionError"):
        got = run(qwen3, [prompt(9)], 3)

    assert got.tokens == plain
    assert [(line.expected, line.fired, line.recorded) for line in got.recording.ledger] == [(2, 2, 1)] * 3
    assert all("layer 1: ZeroDivisionError('mine')" in line.cut for line in got.recording.ledger)


def test_a_hook_that_does_not_fire_is_told(qwen3, run, prompt, monkeypatch):
    """As under a full graph: the layer's Python code does not run again."""
    entries = adapter.Recorder.entries
    monkeypatch.setattr(adapter.Recorder, "entries", lambda self: entries(self)[:2])
    with pytest.warns(CaptureIncomplete, match="1 of 2 attention modules"):
        got = run(qwen3, [prompt(9)], 2)
    assert [line.recorded for line in got.recording.ledger] == [1, 1]
    assert not any(line.complete for line in got.recording.ledger)


def test_no_hook_at_all_is_an_error(qwen3, run, prompt, monkeypatch):
    entries = adapter.Recorder.entries
    monkeypatch.setattr(adapter.Recorder, "entries", lambda self: entries(self)[:1])
    with pytest.raises(Unsupported) as caught:
        run(qwen3, [prompt(9)], 2)
    assert caught.value.rule == "R-BYPASS"


def test_an_engine_that_dies_leaves_what_was_recorded(qwen3, prompt, monkeypatch):
    runner = runner_of(qwen3)
    original = runner.execute_model
    calls = []

    def dies(scheduler_output, *args):
        calls.append(scheduler_output)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return original(scheduler_output, *args)

    written = []
    with monkeypatch.context() as patched:
        patched.setattr(runner, "execute_model", dies, raising=False)
        with (
            pytest.raises(RuntimeError, match="out of memory"),
            record("x.h5", engine="vllm", llm=qwen3, write=lambda *args: written.append(args)),
        ):
            generate(qwen3, [prompt(9)], 6)
    _, recording, kept = written[0]
    assert len(kept) == 4
    assert "out of memory" in recording.ledger[-1].cut
    qwen3.llm_engine.abort_request(list(qwen3.llm_engine.output_processor.request_states), internal=True)
    while qwen3.llm_engine.has_unfinished_requests():
        qwen3.llm_engine.step()


def test_an_untested_version_is_recorded_only_where_its_numbers_fit(qwen3, run, prompt, monkeypatch):
    monkeypatch.setattr(adapter, "engine_name", lambda: "vllm 0.99.1")
    with pytest.warns(adapter.UntestedVersion, match="0.99.1"):
        got = run(qwen3, [prompt(9)], 2)
    assert len(got.calls) == 4
    assert "0.99.1" in got.recording.notes["version"]

    monkeypatch.setattr(vllm_call, "scale_to_bits", lambda scale: scale_to_bits(2 * scale))
    with (
        pytest.warns(adapter.UntestedVersion),
        pytest.raises(Unsupported, match="no other reading fits") as caught,
    ):
        run(qwen3, [prompt(9)], 2)
    assert caught.value.rule == "R-NOTHING"


def observed(engine, run, prompts, monkeypatch, tokens=1):
    """The launches of an engine as its hooks describe them."""
    seen = []
    monkeypatch.setattr(adapter, "engine_name", lambda: "vllm 0.99.1")
    monkeypatch.setattr(FirstLaunches, "check", lambda self, one: seen.append(one))
    with pytest.warns(adapter.UntestedVersion):
        run(engine, prompts, tokens)
    monkeypatch.undo()
    return seen


def test_a_contradicted_convention_is_named(qwen3, run, prompt, monkeypatch):
    """Declared with a sink, computed without one: the check says which reading fits."""
    seen = observed(qwen3, run, [prompt(9)], monkeypatch)[0]
    FirstLaunches().check(seen)
    sink = Bits.from_float32([5.0] * seen.q.shape[1], DType.FLOAT32)
    with pytest.raises(ConventionContradicted, match="O fits no sink in the denominator") as caught:
        FirstLaunches().check(replace(seen, sink=sink))
    assert caught.value.rule == "R-CONVENTION"


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_is_not_recorded(gpt_oss, run, prompt, monkeypatch, off):
    """One key in 16 more or less: the layer with the window is refused, the one without is recorded."""
    monkeypatch.setattr(adapter, "engine_name", lambda: "vllm 0.99.1")

    def wrong(call, step):
        if call.impl.sliding_window > 0:
            impl = SimpleNamespace(**{**vars(call.impl), "sliding_window": call.impl.sliding_window + off})
            call = replace(call, impl=impl)
        return observe(call, step)

    observe = vllm_call.observe_call
    monkeypatch.setattr(adapter, "observe_call", wrong)
    with pytest.warns(adapter.UntestedVersion), pytest.warns(CaptureIncomplete, match="it fits a window of"):
        got = run(gpt_oss, [prompt(40), prompt(9)], 12)
    windows = {call.conventions.window for call in got.calls}
    assert None in windows
    # Until a row has gone past the window nothing tells one window from another, and nothing is wrong yet.
    late = [call for call in got.calls if call.conventions.window and call.rows.positions.max() >= 16]
    assert late == []


def test_a_layer_is_asked_until_its_window_has_been_seen(gpt_oss, run, prompt, monkeypatch):
    """A first launch of few tokens says nothing about a window of 16."""
    short, long = (observed(gpt_oss, run, [prompt(n)], monkeypatch) for n in (9, 40))
    window = next(i for i, one in enumerate(short) if one.conventions.window == 16)
    first = FirstLaunches()
    first.check(short[window])
    late = long[window]
    wrong = replace(late, conventions=replace(late.conventions, window=15))
    selection = Selection({KVFamily.DENSE: window_ranges(late.positions, 15)})
    with pytest.raises(ConventionContradicted, match="it fits a window of 16"):
        first.check(replace(wrong, selection=selection))
    first.check(late)


def test_an_output_that_no_kernel_made_shows_nothing(qwen3, run, prompt, monkeypatch):
    seen = observed(qwen3, run, [prompt(9)], monkeypatch)[0]
    with pytest.raises(ConventionContradicted) as caught:
        FirstLaunches().check(replace(seen, out=replace(seen.out, origin=Origin.DERIVED)))
    assert caught.value.rule == "R-UNSHOWN"


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Requests, "begin"),
        (Requests, "read"),
        (Requests, "ran"),
        (Session, "begin"),
        (Session, "wants"),
        (Session, "observe"),
    ],
)
def test_any_hook_that_fails_leaves_the_engine_and_tells_the_ledger(qwen3, prompt, monkeypatch, owner, name):
    """One step of three is cut, whatever part of the recorder fails in it."""
    qwen3.reset_prefix_cache()
    plain = generate(qwen3, [prompt(9)], 3)
    qwen3.reset_prefix_cache()
    real, calls, kept = getattr(owner, name), [], []

    def broken(self, *args, **kwargs):
        calls.append(name)
        if len(calls) == 2:
            raise ZeroDivisionError("mine")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    with (
        pytest.warns(CaptureIncomplete, match="ZeroDivisionError"),
        record("x.h5", engine="vllm", llm=qwen3, write=lambda *args: kept.append(args)),
    ):
        tokens = generate(qwen3, [prompt(9)], 3)
    assert tokens == plain
    ledger = kept[0][1].ledger
    assert any("ZeroDivisionError('mine')" in line.cut for line in ledger)


@pytest.mark.parametrize("name", ["execute_model", "forward"])
def test_a_function_that_takes_other_arguments_breaks_the_hook_alone(qwen3, prompt, monkeypatch, name):
    """A version that renames an argument: the engine calls its own function as it likes."""
    qwen3.reset_prefix_cache()
    plain = generate(qwen3, [prompt(9)], 2)
    qwen3.reset_prefix_cache()
    runner = runner_of(qwen3)
    owner = (
        runner if name == "execute_model" else attention_layers(runner)["model.layers.1.self_attn.attn"].impl
    )
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *renamed, **more: original(*renamed, **more), raising=False)
    kept = []
    expected = pytest.raises(Unsupported) if name == "execute_model" else pytest.warns(CaptureIncomplete)
    with (
        expected as told,
        record("x.h5", engine="vllm", llm=qwen3, write=lambda *args: kept.append(args)),
    ):
        tokens = generate(qwen3, [prompt(9)], 2)
    assert tokens == plain
    text = str(told.value if name == "execute_model" else told.list[0].message)
    assert "any more: this engine is too new for the recorder" in text


def test_two_requests_with_one_id():
    requests = Requests(Session(), Prefixes([]))
    requests._handles["7"] = 0
    new = [SimpleNamespace(req_id="7")]
    scheduled = SimpleNamespace(finished_req_ids=[], preempted_req_ids=None, scheduled_new_reqs=new)
    with pytest.raises(Unsupported) as caught:
        requests.begin(scheduled)
    assert caught.value.rule == "V-REQUEST-ID"

    requests._handles["7"] = 0
    requests.begin(SimpleNamespace(finished_req_ids=["7"], preempted_req_ids=None, scheduled_new_reqs=new))


def test_a_hook_that_is_gone():
    with pytest.raises(Unsupported, match="no execute_model any more") as caught:
        refuse_runner(SimpleNamespace())
    assert caught.value.rule == "V-HOOK"


def test_another_backend_is_refused_by_name(qwen3):
    class OtherImpl:
        pass

    context = {"model.layers.0.attn": SimpleNamespace(impl=OtherImpl())}
    runner = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    with pytest.raises(Unsupported, match="OtherImpl") as caught:
        attention_layers(runner)
    assert caught.value.rule == "V-BACKEND"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_cache_dtype": "int4"}, "KV cache of int4"),
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "caps its scores"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
    ],
)
def test_what_a_trace_cannot_say_is_refused(qwen3, run, prompt, monkeypatch, change, words):
    """The engine's own call, described as if it had been made otherwise."""
    real = vllm_call.observe_call

    def other(call, step):
        impl = SimpleNamespace(**{**vars(call.impl), **change})
        cache = call.kv_cache[:1].int() if "kv_cache_dtype" in change else call.kv_cache
        return real(replace(call, impl=impl, kv_cache=cache), step)

    monkeypatch.setattr(adapter, "observe_call", other)
    with pytest.raises(Unsupported, match=words):
        run(qwen3, [prompt(5)], 1)
    with pytest.raises(Unsupported), record("x.h5", llm=qwen3, write=lambda *_: None):
        generate(qwen3, [prompt(5)], 1)
