"""What goes wrong becomes a sentence and a line of the ledger; the engine goes on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.engines_vllm.tiny_engine import generate
from tracekit.engines import vllm as adapter
from tracekit.engines import vllm_call
from tracekit.engines.vllm_check import check_conventions
from tracekit.engines.vllm_points import attention_layers, refuse_runner, runner_of
from tracekit.engines.vllm_prefixes import Prefixes
from tracekit.engines.vllm_step import Requests
from tracekit.errors import ConventionContradicted, Unsupported
from tracekit.model import Bits, DType, scale_to_bits
from tracekit.recorder.api import CaptureIncomplete, record
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

    def dies(scheduled, *args):
        calls.append(scheduled)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return original(scheduled, *args)

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
        pytest.raises(Unsupported, match="fits no other reading") as caught,
    ):
        run(qwen3, [prompt(9)], 2)
    assert caught.value.rule == "R-NOTHING"


def test_a_contradicted_convention_is_named(qwen3, run, prompt, monkeypatch):
    """Declared with a sink, computed without one: the check says which reading fits."""
    seen = []
    monkeypatch.setattr(adapter, "engine_name", lambda: "vllm 0.99.1")
    monkeypatch.setattr(adapter, "check_conventions", seen.append)
    with pytest.warns(adapter.UntestedVersion):
        run(qwen3, [prompt(9)], 1)
    check_conventions(seen[0])
    sink = Bits.from_float32([5.0] * seen[0].q.shape[1], DType.FLOAT32)
    with pytest.raises(ConventionContradicted, match="it fits without the sink") as caught:
        check_conventions(replace(seen[0], sink=sink))
    assert caught.value.rule == "V-CONTRADICTED"


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
