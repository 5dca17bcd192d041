"""The same checkpoint and prompts through transformers and vLLM: lined up by their tokens, then compared."""

import tracekit
from tests.engines_vllm.tiny_engine import generate
from tracekit.compare.diff import EQUAL
from tracekit.engines.driver import run_transformers
from tracekit.recorder.api import record


def test_diff_lines_up_transformers_and_vllm(qwen3, prompt, tmp_path):
    prompts = [prompt(70, 1), prompt(9, 2)]
    base, target = tmp_path / "transformers.h5", tmp_path / "vllm.h5"
    qwen3.reset_prefix_cache()
    with record(target, engine="vllm", llm=qwen3):
        tokens = generate(qwen3, prompts[::-1], 4)[::-1]
    told = run_transformers("tiny-qwen3", prompts, out=base, max_new_tokens=4, forced=tokens)
    assert told.problems == ()

    with tracekit.open(base) as ours, tracekit.open(target) as theirs:
        assert ours.recording.identity.config_digest == theirs.recording.identity.config_digest
        requests = {r.key: r.token_ids.tolist() for r in ours.recording.requests}
        assert requests == {r.key: r.token_ids.tolist() for r in theirs.recording.requests}
    found = tracekit.diff(base, target)
    assert sorted(pair.tokens for pair in found.pairs) == [9 + 3, 70 + 3]
    assert [part.tensor for part in found.parts if part.layer == 0][:2] == ["conventions", "q"]
    assert next(part for part in found.parts if part.tensor == "conventions").verdict == EQUAL
    assert found.first is not None
    assert found.first.layer == 0
    assert found.first.place is not None
