"""`python -m tools.pair.rollout FOLDER`: vLLM on the CPU serves the prompt, and leaves a run folder.

A process of its own: vLLM and Megatron-core each make the default process group of torch, and vLLM binds the
threads of its process to cores.
"""

import argparse
from pathlib import Path
from typing import Any

from tools.pair.job import CHUNK, MODEL, NEW_TOKENS, PAGE, PROMPT, identity
from tools.pair.readback import TKA1_ASKED, Asked
from tools.pair.side import PART, die_in, finish
from tools.vllm_here import LLM, SamplingParams
from tracekit.contract import Role, SplitMode, SplitRequest
from tracekit.contract.folder import RUN_SCHEMA, RunHead, write_head
from tracekit.engines import tiny, vllm_backend
from tracekit.engines.vllm_points import attention_layers, runner_of
from tracekit.errors import BindingInvalid
from tracekit.recorder.api import record

OWN = Asked("vllm.cpu_attention", SplitRequest(SplitMode.AUTO, strict=False))
"""vLLM as it comes: the plan of a launch cuts the keys as batch and threads say."""

HEAD = RunHead(RUN_SCHEMA, Role.INFER, 1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.pair.rollout", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tka1", action="store_true", help="TKA-1 as the backend")
    parser.add_argument(
        "--falls-back", action="store_true", help="layer 1 runs vLLM's own kernel all the same"
    )
    parser.add_argument("--dies", action="store_true", help="the engine is killed in its second launch")
    given = parser.parse_args()
    folder: Path = given.folder
    try:
        write_head(folder, HEAD, identity())
    except BindingInvalid as refused:
        parser.error(str(refused))
    llm = engine(tka1=given.tka1)
    if given.falls_back:
        fall_back(llm)
    if given.dies:
        die_in(runner_of(llm).model, 1)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
    with record(folder / PART, engine="vllm", llm=llm) as session:
        llm.generate([{"prompt_token_ids": list(PROMPT)}], sampling, use_tqdm=False)
    finish(folder, HEAD, TKA1_ASKED if given.tka1 else OWN, session.problems)


def engine(*, tka1: bool) -> Any:
    """Start vLLM: chunked prefill, pages, no prefix cache, nothing compiled."""
    if tka1:
        vllm_backend.register()
    return LLM(
        model=str(tiny.prepared(MODEL)),
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK,
        block_size=PAGE,
        dtype="bfloat16",
        seed=0,
        enable_prefix_caching=False,
    )


def fall_back(llm: Any) -> None:
    """Give layer 1 the implementation that vLLM would have chosen; a setting still says TKA-1."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    layer = attention_layers(runner_of(llm))["model.layers.1.self_attn.attn"]
    layer.impl.__class__ = CPUAttentionBackendImpl


if __name__ == "__main__":
    main()
