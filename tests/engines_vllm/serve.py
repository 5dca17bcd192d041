"""Run as a program: vLLM as it comes, its engine compiled and in a process of its own. Prints JSON."""

import json
import os
import sys

from vllm import LLM, SamplingParams

from tracekit.errors import Unsupported
from tracekit.recorder.api import record


def main(model: str, prompts: list[list[int]]) -> None:
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=32,
        dtype="bfloat16",
        seed=0,
    )
    sampling = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    refused = ""
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1":
        try:
            with record("never.h5", engine="vllm", llm=llm):
                pass
        except Unsupported as error:
            refused = error.rule
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    print(json.dumps({"pid": os.getpid(), "tokens": tokens, "refused": refused}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
