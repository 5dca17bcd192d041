"""Real vLLM on the CPU with tiny checkpoints. Not part of `make test`: `make test-engines` runs this folder."""

import os

# Read by vLLM when it is imported: one process, no hub, a cache of 1 GiB.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from vllm import LLM, SamplingParams

from tracekit.engines import tiny
from tracekit.model import AttentionCall, KVFamily, Recording
from tracekit.recorder.api import record

PAGE = 32
CHUNK = 64


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
            **options,
        },
    )


def generate(llm, prompts, max_tokens=4, **options):
    """Return the new token ids, one list a sequence."""
    sampling = SamplingParams(
        max_tokens=max_tokens, **{"temperature": 0, "detokenize": False, "ignore_eos": True, **options}
    )
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [list(output.token_ids) for answer in answers for output in answer.outputs]


@pytest.fixture(scope="session")
def run():
    """Record what an engine generates; prefixes that it has cached are forgotten before."""

    def recorded(llm, prompts, max_tokens=4, *, keep_cache=False, sampling=None, **options):
        if not keep_cache:
            llm.reset_prefix_cache()
        result = Recorded()
        with record("unused.h5", engine="vllm", llm=llm, write=result.write, **options) as session:
            result.session = session
            result.tokens = generate(llm, prompts, max_tokens, **(sampling or {}))
        return result

    return recorded


@pytest.fixture(scope="session")
def prompt():
    """Token ids without 0, 1, 2, which are special to the tiny models."""

    def ids(count, seed=0):
        return np.random.default_rng(seed).integers(3, tiny.VOCABULARY, count).tolist()

    return ids


@pytest.fixture(scope="session")
def qwen3():
    return engine("tiny-qwen3")


@pytest.fixture(scope="session")
def gpt_oss():
    return engine("tiny-gpt-oss")


def dense(call, request=0):
    """The KV rows of one request of a call."""
    return call.kv[call.rows.requests[request]][KVFamily.DENSE]
