"""Real vLLM on the CPU. Not part of `make test`: `make test-engines` names this folder."""

import numpy as np
import pytest

from tests.engines_vllm.tiny_engine import CRAMPED, Recorded, engine, generate, on_tka1
from tracekit.engines import tiny
from tracekit.recorder.api import record


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
def qwen3(gpt_oss):
    """After gpt-oss: vLLM makes process groups once a process, and those of an expert model serve both."""
    return engine("tiny-qwen3")


# An engine that goes away takes the process groups of all others with it, so all live as long as the session.
@pytest.fixture(scope="session")
def qwen3_fp8(qwen3):
    return engine("tiny-qwen3", kv_cache_dtype="fp8")


@pytest.fixture(scope="session")
def qwen3_cramped(qwen3):
    """So few pages that two long answers do not fit beside each other."""
    return engine("tiny-qwen3", **CRAMPED)


@pytest.fixture(scope="session")
def qwen3_shared(qwen3):
    """As few pages, and prefixes are shared: who was preempted finds some of its own rows again."""
    return engine("tiny-qwen3", **CRAMPED | {"enable_prefix_caching": True})


@pytest.fixture(scope="session")
def qwen3_tka1_wide(qwen3):
    """In other dtypes. Kept to the end: an engine that goes takes the process groups of all engines along."""
    with on_tka1():
        return {dtype: engine("tiny-qwen3", dtype=dtype) for dtype in ("float16", "float32")}


@pytest.fixture(scope="session")
def qwen3_tka1(qwen3):
    with on_tka1():
        return engine("tiny-qwen3")


@pytest.fixture(scope="session")
def qwen3_tka1_fp8(qwen3):
    with on_tka1():
        return engine("tiny-qwen3", kv_cache_dtype="fp8")


@pytest.fixture(scope="session")
def qwen3_tka1_cramped(qwen3):
    with on_tka1():
        return engine("tiny-qwen3", **CRAMPED)


@pytest.fixture(scope="session")
def gpt_oss_tka1(gpt_oss):
    with on_tka1():
        return engine("tiny-gpt-oss")


@pytest.fixture(scope="session")
def gpt_oss():
    return engine("tiny-gpt-oss")
