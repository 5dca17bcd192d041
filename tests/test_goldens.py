"""The committed goldens, replayed through the pytest plugin: what every machine can prove of them."""

from pathlib import Path

import numpy as np
import pytest

import tracekit
from tracekit.providers.base import Launch
from tracekit.providers.registry import create, for_kernel
from tracekit.providers.transformers_identity import executed

TRACES = sorted((Path(__file__).parents[1] / "traces").glob("*.h5"))


def golden_params(**kwargs):
    return [
        pytest.param(path, id=path.stem, marks=pytest.mark.tracekit(f"traces/{path.name}", **kwargs))
        for path in TRACES
    ]


def test_there_are_goldens():
    assert {path.name.split(".")[0] for path in TRACES} == {
        "smollm2-prefill",
        "smollm2-decode",
        "qwen3-batch",
        "gpt-oss",
        "deepseek-v4",
        "deepseek-v4-indexer",
        "vllm-qwen3",
        "vllm-gpt-oss",
        "mla",
        "gpt-train",
    }


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_golden_is_small_and_sound(path):
    assert path.stat().st_size <= 1_000_000
    assert tracekit.verify(path) == []


@pytest.mark.parametrize("path", golden_params(provider="tka1"))
def test_tka1_keeps_its_promises(path, golden):
    golden.check()


@pytest.mark.parametrize(
    "path",
    [p for p in TRACES if ".tka1." not in p.name and ".megatron." not in p.name],
    ids=lambda path: path.stem,
)
def test_an_engine_golden_speaks_for_itself(path):
    """Without a provider: O is inside its own envelope, and comes again where the same build runs."""
    with tracekit.open(path) as trace:
        call = trace.call(0)

    report = tracekit.replay(path, claims=["control", "recorded"])

    assert report.find("control", "trace").status is tracekit.Status.BOUNDED
    kernel = call.provenance.executed.kernel
    again = report.find("recorded", for_kernel(kernel))
    if kernel.startswith("vllm."):  # its own environment runs it: tests/engines_vllm/test_goldens.py
        assert again.status is tracekit.Status.NOT_RUN
        return
    here = executed(kernel)
    if call.provenance.executed.differences(here):
        assert again.status is tracekit.Status.NOT_RUN
        assert "another kernel would run" in again.reason
    else:
        assert again.status is tracekit.Status.HELD
        assert again.control == "twin-recorded refuted"


def test_a_golden_of_an_engine_that_is_not_here_says_so():
    """`make test-engines` runs it again where Megatron-core is installed."""
    path = next(path for path in TRACES if ".megatron." in path.name)
    report = tracekit.replay(path, claims=["control", "recorded"])
    assert report.find("control", "trace").status is tracekit.Status.BOUNDED
    again = report.find("recorded", "megatron")
    assert again.status is tracekit.Status.NOT_RUN
    assert "Megatron-core is not installed" in again.reason


def test_the_golden_of_a_training_run_has_every_gradient():
    with tracekit.open(next(path for path in TRACES if ".megatron." in path.name)) as trace:
        calls = list(trace)
    assert {(call.step, call.layer) for call in calls} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for call in calls:
        assert call.grads is not None
        assert call.grads.d_q is not None
        assert call.grads.d_sink is not None
        assert set(call.grads.d_kv) == set(call.rows.requests)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_cpp_and_numpy_give_equal_bits(path):
    """Not the golden's bits alone: both forms on every recorded input."""
    forms = [create(name) for name in ("tka1", "tka1-numpy")]
    with tracekit.open(path) as trace:
        for index in range(len(trace)):
            launch = Launch((trace.call(index),))
            (native,), (numpy,) = (form.run(launch).tensors for form in forms)
            assert native.out.same(numpy.out), index
            assert native.lse is not None
            assert numpy.lse is not None
            assert native.lse.same(numpy.lse), index


@pytest.mark.parametrize("path", [p for p in TRACES if ".tka1." in p.name], ids=lambda path: path.stem)
@pytest.mark.parametrize("provider", ["tka1", "tka1-numpy"])
def test_recorded_answers_come_again_from_each_form(path, provider):
    report = tracekit.replay(path, provider=provider, claims="recorded")
    assert report.exit_code == 0
    (verdict,) = report.verdicts
    assert verdict.status is tracekit.Status.HELD


def test_a_golden_with_one_flipped_output_bit_is_refuted(tmp_path):
    """The check above can fail: the same trace, one bit of one output changed, written soundly."""
    from dataclasses import replace

    from tracekit.model import Bits
    from tracekit.store import write_trace

    source = next(path for path in TRACES if path.name == "qwen3-batch.tka1.h5")
    with tracekit.open(source) as trace:
        calls = list(trace)
        recording = trace.recording
    data = np.array(calls[0].out.bits.data)
    data[2, 1, 3] ^= 1
    calls[0] = replace(calls[0], out=replace(calls[0].out, bits=Bits(data, calls[0].out.bits.dtype)))
    write_trace(tmp_path / "flipped.h5", recording, calls)

    report = tracekit.replay(tmp_path / "flipped.h5", provider="tka1", claims="recorded")

    assert report.exit_code == 1
    place = report.first.first
    row = calls[0].rows.ids[2]
    assert (place.request, place.position, place.head, place.element, place.tensor) == (
        str(row.request),
        row.position,
        1,
        3,
        "out",
    )
    assert report.first.differences.elements == 1
