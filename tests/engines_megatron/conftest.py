"""Real Megatron-core on the CPU. Not part of `make test`: `make test-engines` names this folder."""

import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tracekit.engines import megatron_tiny as tiny
from tracekit.model import AttentionCall, IndexerCall, KVFamily, Recording
from tracekit.recorder.api import record


@dataclass
class Recorded:
    """What a recording gave, and the session that made it."""

    recording: Recording | None = None
    calls: list[AttentionCall] = field(default_factory=list)
    indexer_calls: list[IndexerCall] = field(default_factory=list)
    session: Any = None
    result: Any = None

    def write(self, _, recording, calls, indexer_calls=()):
        self.recording, self.calls, self.indexer_calls = recording, calls, list(indexer_calls)


@pytest.fixture(scope="session", autouse=True)
def _process():
    """One rank; one thread: OpenMP workers that wait for tiny products would take the time of other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tiny.on_cpu():
        yield
    torch.set_num_threads(threads)


@cache
def _model(options):
    return tiny.gpt(**{name: list(v) if isinstance(v, tuple) else v for name, v in options})


@pytest.fixture
def gpt():
    """A tiny model, made once for its options; without gradients, in evaluation mode."""

    def make(**options):
        model = _model(tuple(sorted(options.items())))
        model.zero_grad(set_to_none=True)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def recorded():
    """Record what `action(model)` does."""

    def run(model, action, **options):
        result = Recorded()
        with record("unused.h5", engine="megatron", model=model, write=result.write, **options) as session:
            result.session = session
            result.result = action(model)
        return result

    return run


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(3, tiny.VOCABULARY, count).tolist()


@dataclass
class Batch:
    """Sequences as Megatron gets them, and what the backward is asked with."""

    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    real: Any = ...
    more: dict[str, Any] = field(default_factory=dict)

    def forward(self, model):
        return model(self.tokens, self.positions, self.mask, **self.more)

    def train(self, model):
        """A step without an optimizer: logits, and every gradient by name."""
        model.train()
        model.zero_grad(set_to_none=True)
        logits = self.forward(model)
        logits[self.real].float().pow(2).mean().backward()
        return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def plain(*lengths, seed=0):
    """Sequences of one length under one causal mask."""
    (length,) = set(lengths)
    tokens = torch.tensor([ids(length, seed + i) for i in range(len(lengths))])
    return Batch(tokens, torch.arange(length).expand(len(lengths), length), tiny.causal(length))


def padded(*lengths, left=False, seed=0):
    """Sequences of several lengths; the mask hides the keys of padding, as BERT-like masks do."""
    room = max(lengths)
    tokens, positions = torch.zeros(2, len(lengths), room, dtype=torch.long)
    hidden = torch.ones(len(lengths), 1, 1, room, dtype=torch.bool)
    for b, length in enumerate(lengths):
        at = slice(room - length, room) if left else slice(0, length)
        tokens[b, at], positions[b, at] = torch.tensor(ids(length, seed + b)), torch.arange(length)
        hidden[b, ..., at] = False
    return Batch(tokens, positions, hidden | tiny.causal(room), ~hidden[:, 0, 0])


def documents(*lengths, seed=0):
    """Documents in one batch place: reset_position_ids and reset_attention_mask."""
    tokens = torch.tensor([[token for i, n in enumerate(lengths) for token in ids(n, seed + i)]])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = tiny.causal(len(owner)) | (owner[:, None] != owner[None])
    return Batch(tokens, positions, mask)


WHOLE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Every layer is checkpointed by itself."""


def backward(batch, model, **options):
    batch.forward(model)[batch.real].float().pow(2).mean().backward(**options)


def train_steps(model, make=plain, lengths=(8, 8)):
    """Forward and backward of two microbatches, twice, each time with a step of the optimizer behind them."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        for micro in range(2):
            backward(make(*lengths, seed=10 * step + 100 * micro), model)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def run_ranks(folder, *options, ranks=2):
    """Train with `weights.pt` of a folder in processes of one tensor parallel group; return their traces."""
    port = tiny.free_port()
    paths = [folder / f"rank{rank}.h5" for rank in range(ranks)]
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", "-m", "tests.engines_megatron.rank"),
                *(str(rank), str(ranks), str(port), folder / "weights.pt", path, *options),
            ],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, path in enumerate(paths)
    ]
    for process in started:
        _, told = process.communicate(timeout=120)
        assert process.returncode == 0, told
    return paths


def dense(call, request=0):
    """The KV rows of one request of a call."""
    return call.kv[call.rows.requests[request]][KVFamily.DENSE]
