"""What a rollout of vLLM and the recompute of the same rows have in common: one engine, one set of weights.

`python -m tools.findings.vllm_rollout_recompute`, in the environment of `make test-engines`, serves 8 tokens
after a prompt of 24 and of 300 (a prefill, then decodes), then prompt and tokens as one new prompt (one
prefill, nothing cached), and compares every row by position: with vLLM's own kernel, and with TKA-1 as the
backend.
"""

from typing import Any

import numpy as np

from tools.findings.rollout_recompute import TENSORS, TOKENS, differing, recorded
from tools.vllm_here import LLM, SamplingParams
from tracekit.engines import tiny, vllm_backend

MODEL = "tiny-qwen3"
PROMPTS = 24, 300


def main() -> None:
    print("| prompt | attention | layer | " + " | ".join(TENSORS) + " |")
    print("|---|---|---|" + "---|" * len(TENSORS))
    own = engine()
    vllm_backend.register()
    for attention, llm in (("vllm-cpu", own), ("tracekit", engine())):
        for length in PROMPTS:
            for line in compared(llm, length):
                print(f"| {length} | {attention} | {line} |")


def engine() -> Any:
    """Start vLLM with the backend that is registered; nothing compiled, no prefix cached."""
    return LLM(
        model=str(tiny.prepared(MODEL)),
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        dtype="bfloat16",
        enable_prefix_caching=False,
    )


def compared(llm: Any, length: int) -> list[str]:
    """Roll out and recompute a prompt of some tokens; one line a layer."""
    prompt = np.random.default_rng(0).integers(3, tiny.VOCABULARY, length).tolist()
    tokens: list[int] = []
    rollout = recorded(lambda: tokens.extend(serve(llm, prompt, TOKENS)), engine="vllm", llm=llm)
    recompute = recorded(lambda: serve(llm, prompt + tokens[:-1], 1), engine="vllm", llm=llm)
    return differing(rollout, recompute)


def serve(llm: Any, prompt: list[int], tokens: int) -> list[int]:
    """Return the most likely next tokens; nothing of an earlier prompt is used again."""
    llm.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
    (done,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return list(done.outputs[0].token_ids)


if __name__ == "__main__":
    main()
