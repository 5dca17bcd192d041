from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tracekit.engines import tiny, transformers_backend
from tracekit.model import AttentionCall, IndexerCall, Recording
from tracekit.recorder.api import record


@dataclass
class Recorded:
    """What a recording gave, kept in memory, and what the session knew."""

    recording: Recording | None = None
    calls: list[AttentionCall] = field(default_factory=list)
    indexer_calls: list[IndexerCall] = field(default_factory=list)
    session: Any = None

    def write(self, _, recording, calls, indexer_calls=()):
        self.recording, self.calls, self.indexer_calls = recording, calls, list(indexer_calls)

    def at(self, *, layer, step):
        return next(c for c in self.calls if (c.layer, c.step) == (layer, step))


@pytest.fixture(scope="session")
def recorded():
    """Record what `run(model)` does and return it."""

    def run(model, action, **options):
        result = Recorded()
        with record(
            "unused.h5", engine="transformers", model=model, write=result.write, **options
        ) as session:
            result.session = session
            action(model)
        return result

    return run


@pytest.fixture(scope="session", autouse=True)
def _engine():
    """One thread: OpenMP workers that wait for tiny products would take the time of other tests."""
    transformers_backend.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def _models():
    return {name: tiny.build(name) for name in tiny.CONFIGS}


@pytest.fixture
def qwen3(_models):
    model = _models["tiny-qwen3"]
    model.set_attn_implementation("sdpa")
    return model


@pytest.fixture
def gpt_oss(_models):
    model = _models["tiny-gpt-oss"]
    model.set_attn_implementation("eager")
    return model


@pytest.fixture
def deepseek_v4(_models):
    return _models["tiny-deepseek-v4"]


@pytest.fixture
def deepseek_v32(_models):
    model = _models["tiny-deepseek-v32"]
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="session")
def prompt():
    """Token ids without 0, 1, 2, which are special to the tiny models."""

    def ids(count, seed=0):
        return np.random.default_rng(seed).integers(3, tiny.VOCABULARY, count).tolist()

    return ids
