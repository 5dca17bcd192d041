"""Record vLLM on the CPU with the tiny Qwen3: three prompts, three tokens each.

Run it in the environment of `make test-engines`, as `python -m tools.findings.vllm_cpu_record OUT.h5`;
VLLM_CPU_ATTN_SPLIT_KV=0 turns split-KV off.
"""

import sys
from pathlib import Path

import numpy as np

from tools.vllm_here import LLM, SamplingParams
from tracekit.engines import tiny
from tracekit.recorder.api import record


def main(out: Path) -> None:
    llm = LLM(
        model=str(tiny.prepared("tiny-qwen3")),
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=64,
        block_size=32,
        dtype="bfloat16",
    )
    prompts = [np.random.default_rng(n).integers(3, tiny.VOCABULARY, n).tolist() for n in (400, 7, 60)]
    sampling = SamplingParams(max_tokens=3, temperature=0, detokenize=False, ignore_eos=True)
    with record(out, engine="vllm", llm=llm) as session:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    print(f"{out}: {session.recorded} calls")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
