"""What is written is read: every field, every bit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.calls import PROVENANCE, decode_steps, plan, prefill, recording, two_families
from tests.store.same import differences, same_recording
from tests.store.strategies import calls
from tracekit.errors import InvalidCall, NothingSelected, Unsupported
from tracekit.model import Bits, DType, LaunchPlan, Recording, StepRecord
from tracekit.store import open_trace, verify_trace, write_trace


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(calls(), min_size=1, max_size=4), st.sampled_from((1, 2)))
def test_random_calls(tmp_path, written, threads):
    path = tmp_path / "random.h5"
    write_trace(path, recording(written), written, threads=threads)

    with open_trace(path, threads=threads) as trace:
        read = list(trace)
        assert same_recording(trace.recording, recording(written))
    assert [differences(a, b) for a, b in zip(written, read, strict=True)] == [[] for _ in written]
    assert verify_trace(path) == []


def test_heads_say_what_the_calls_say(tmp_path):
    written = [prefill(launch=plan(8)), prefill(1, grads=True), two_families(), *decode_steps(2)]
    write_trace(tmp_path / "x.h5", recording(), written)

    with open_trace(tmp_path / "x.h5") as trace:
        assert len(trace) == len(written)
        for index, (head, call) in enumerate(zip(trace.heads, written, strict=True)):
            assert head.index == index
            assert (head.layer, head.step, head.rank, head.mode) == (
                call.layer,
                call.step,
                call.rank,
                call.mode,
            )
            assert (head.num_rows, head.num_heads, head.num_kv_heads) == (
                call.num_rows,
                call.num_heads,
                call.num_kv_heads,
            )
            assert (head.head_dim, head.value_dim, head.dtype) == (call.head_dim, call.value_dim, call.dtype)
            assert head.requests == call.rows.requests
            assert head.kernel == PROVENANCE.executed.kernel
            assert head.has_sink is (call.sink is not None)
            assert head.out is (call.out and call.out.origin)
            assert head.lse is (call.lse and call.lse.origin)
            assert head.has_launch_plan is (call.launch is not None)
            assert head.has_gradients is (call.grads is not None)


def test_calls_over_many_chunks(tmp_path):
    """Rows of one stack cross chunks of 512 KiB; a second call starts in the middle of one."""
    written = [prefill(seed, (700, 50), dims=(64, 32), heads=(16, 4), layer=seed) for seed in range(3)]
    summary = write_trace(tmp_path / "x.h5", Recording(), written, threads=2)

    with open_trace(tmp_path / "x.h5", threads=2) as trace:
        assert [differences(a, b) for a, b in zip(written, trace, strict=True)] == [[], [], []]
    assert summary.recorded > 3 << 20
    assert verify_trace(tmp_path / "x.h5") == []


@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_that_do_not_fit_in_memory(tmp_path, monkeypatch, threads):
    """The file of the spool holds them: what is read back is what was just written, short chunks too."""
    monkeypatch.setattr("tracekit.store.spool.HOLD", 0)
    written = [prefill(0, (700, 50), dims=(64, 32)), *decode_steps(3)]
    write_trace(tmp_path / "x.h5", Recording(), written, threads=threads)

    with open_trace(tmp_path / "x.h5") as trace:
        assert [differences(a, b) for a, b in zip(written, trace, strict=True)] == [[], [], [], []]
    assert verify_trace(tmp_path / "x.h5") == []


def test_the_same_input_gives_the_same_file(tmp_path):
    for name, threads in (("a", 1), ("b", 2)):
        written = [prefill(seed, (300, 50), dims=(64, 64)) for seed in range(2)]
        write_trace(tmp_path / name, recording(), written, threads=threads)

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_memory_of_a_call_may_be_reused(tmp_path):
    """An adapter may record out of one buffer; whole chunks are encoded in place."""
    buffer = np.zeros((2048, 4, 64), np.uint16)
    template = prefill(0, (2048,), dims=(64, 64))

    def record():
        for value in (1, 2):
            buffer[:] = value
            yield replace(template, q=Bits(buffer, DType.BFLOAT16))

    write_trace(tmp_path / "x.h5", Recording(), record(), threads=2)
    with open_trace(tmp_path / "x.h5") as trace:
        assert [set(np.unique(call.q.data)) for call in trace] == [{1}, {2}]


def test_a_trace_without_calls_is_not_written(tmp_path):
    with pytest.raises(NothingSelected) as refused:
        write_trace(tmp_path / "x.h5", recording(), [])
    assert refused.value.rule == "S-EMPTY"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("launch", "rule"),
    [
        ({"arrays": {"names": np.array(["a"])}}, "S-ARRAY"),
        ({"arrays": {"object": np.array([object()])}}, "S-ARRAY"),
        ({"scalars": {"x": object()}}, "S-SCALAR"),
    ],
)
def test_what_the_format_does_not_hold_is_refused_by_name(tmp_path, launch, rule):
    call = prefill(launch=LaunchPlan("k", np.arange(8), 8, **launch))

    with pytest.raises(Unsupported) as refused:
        write_trace(tmp_path / "x.h5", recording(), [call])
    assert refused.value.rule == rule


def test_text_that_is_no_text_is_refused_when_it_is_written(tmp_path):
    with pytest.raises(Unsupported) as refused:
        write_trace(tmp_path / "x.h5", Recording(notes={"a": 1}), [prefill()])
    assert refused.value.rule == "S-TEXT"


def test_a_request_is_listed_once(tmp_path):
    twice = Recording(requests=recording().requests[:1] * 2)
    with pytest.raises(InvalidCall) as refused:
        write_trace(tmp_path / "x.h5", twice, [prefill()])
    assert refused.value.rule == "S-REQUEST-TWICE"


@pytest.mark.parametrize(
    ("steps", "words"), [((0, 0), "two lines of step 0"), ((1, 0), "counts 1 calls of step 1, .* holds 0")]
)
def test_a_ledger_of_other_calls_is_refused(tmp_path, steps, words):
    ledger = tuple(StepRecord(step, 1, 1, 1, 0) for step in steps)
    with pytest.raises(InvalidCall, match=words) as refused:
        write_trace(tmp_path / "x.h5", Recording(ledger=ledger), [prefill()])
    assert refused.value.rule == "S-LEDGER"
    assert list(tmp_path.iterdir()) == []


def test_a_step_of_a_call_has_its_line(tmp_path):
    calls = decode_steps(2)
    with pytest.raises(InvalidCall, match="no line of step 1") as refused:
        write_trace(tmp_path / "x.h5", recording(calls[:1]), calls)
    assert refused.value.rule == "S-LEDGER"


@pytest.mark.parametrize("number", [{"layer": 2**32}, {"rank": 2**32}, {"step": 2**62}])
def test_numbers_over_the_limits_are_refused(tmp_path, number):
    with pytest.raises(Unsupported) as refused:
        write_trace(tmp_path / "x.h5", recording(), [replace(prefill(), **number)])
    assert refused.value.rule == "S-LIMIT"
