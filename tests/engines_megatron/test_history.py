"""Histories of real training on Megatron: legal as they are; each planted violation has its code and place."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import tracekit
from tests.engines_megatron.conftest import ids, padded, plain
from tracekit.cli.main import run
from tracekit.engines import megatron_tiny as tiny
from tracekit.gate.recorded import Legality, judge
from tracekit.model.events import Finish, GateMode, Migrate, NewWeights, Preempt, ResetCache, Rollback, Sleep
from tracekit.model.history import Pass, PassBackward
from tracekit.recorder.api import CaptureIncomplete
from tracekit.store import write_trace

WHOLE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FIRST = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}
KERNEL = "megatron.dot_product"


def packed(*lengths, seed=0):
    """A packed launch (`thd`)."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from tests.engines_megatron.conftest import Batch

    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    tokens = torch.tensor([[token for i, n in enumerate(lengths) for token in ids(n, seed + i)]])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return Batch(tokens, positions, None, more={"packed_seq_params": params})


def backward(batch, model, **options):
    batch.forward(model)[batch.real].float().pow(2).mean().backward(**options)


def two_steps(model, make=plain, lengths=(8, 8)):
    """Forward, recompute and backward of two microbatches, twice, each with a step of the optimizer."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        for micro in range(2):
            backward(make(*lengths, seed=10 * step + 100 * micro), model)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@pytest.fixture
def trained(recorded):
    def train(action=two_steps, options=None, **filters):
        return recorded(tiny.gpt(**(options or {})), action, **filters)

    return train


def kinds(got):
    return [type(entry) for entry in got.recording.history]
