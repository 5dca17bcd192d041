"""Real vLLM on the CPU with tiny checkpoints."""

import os

# Read by vLLM when it is imported: one process, no hub, a cache of 1 GiB.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM, SamplingParams

from tracekit.engines import tiny, vllm_backend
from tracekit.model import AttentionCall, KVFamily, Recording

PAGE = 32
CHUNK = 64
CRAMPED = {"max_model_len": 192, "num_gpu_blocks_override": 8, "enable_prefix_caching": False}


@dataclass
class Recorded:
    """What a recording gave, the session that made it, and what the engine answered."""

    recording: Recording | None = None
    calls: list[AttentionCall] = field(default_factory=list)
    session: Any = None
    tokens: list[list[int]] = field(default_factory=list)

    def write(self, _, recording, calls):
        self.recording, self.calls = recording, calls

    def of(self, layer):
        return [call for call in self.calls if call.layer == layer]


# vLLM rotates gpt-oss by YaRN only, as its published checkpoints do.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 1.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def engine(name, **options):
    """Start vLLM on a tiny checkpoint: pages of 32 rows, chunks of 64 tokens."""
    return LLM(
        model=str(tiny.prepared(name)),
        **{
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "max_num_batched_tokens": CHUNK,
            "block_size": PAGE,
            "dtype": "bfloat16",
            "seed": 0,
            "enable_prefix_caching": True,
            "hf_overrides": {"rope_parameters": YARN} if name == "tiny-gpt-oss" else {},
            **options,
        },
    )


@contextmanager
def on_tka1():
    """Engines that are made here run their attention on TKA-1."""
    vllm_backend.register()
    try:
        yield
    finally:
        vllm_backend.unregister()


def generate(llm, prompts, max_tokens=4, **options):
    """Return the new token ids, one list a sequence."""
    sampling = SamplingParams(
        max_tokens=max_tokens, **{"temperature": 0, "detokenize": False, "ignore_eos": True, **options}
    )
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [list(output.token_ids) for answer in answers for output in answer.outputs]


def dense(call, request=0):
    """The KV rows of one request of a call."""
    return call.kv[call.rows.requests[request]][KVFamily.DENSE]
