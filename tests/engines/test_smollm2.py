"""SmolLM2-135M with its real weights, converted once into the cache."""

import pytest
import torch

from tracekit.engines.driver import run_transformers
from tracekit.engines.models import load_model
from tracekit.store import open_trace


@pytest.fixture(scope="module")
def smollm2():
    return load_model("smollm2")


def test_the_weights_are_the_real_ones(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        token = model(**ids).logits[0, -1].argmax().item()
    assert tokenizer.decode(token) == " Paris"


@pytest.mark.parametrize(("kernel", "executed"), [("sdpa", "transformers.sdpa"), ("tracekit", "tka1")])
def test_a_trace_is_written_and_read(smollm2, kernel, executed, tmp_path):
    model, tokenizer = smollm2
    prompt = tokenizer("Attention, recorded in bits:")["input_ids"]
    summary = run_transformers(
        model, [prompt], out=tmp_path / "x.h5", max_new_tokens=3, attn_implementation=kernel, layers=[0, 29]
    )

    assert summary.problems == ()
    assert (summary.steps, summary.calls) == (3, 6)
    with open_trace(tmp_path / "x.h5") as trace:
        calls = list(trace)
        assert trace.recording.requests[0].token_ids.tolist() == [*prompt, *summary.generated[0][:2]]
        assert trace.recording.identity.model == "smollm2"
    assert {call.provenance.executed.kernel for call in calls} == {executed}
    assert [(call.num_heads, call.num_kv_heads, call.head_dim) for call in calls] == [(9, 3, 64)] * 6
