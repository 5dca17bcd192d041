"""`python -m tools.pair.training FOLDER ROLLOUT`: Megatron-core trains on what the rollout computed.

One forward over the whole sequence and one backward, on the rollout's weights and tokens. With `--inject`
each core attention also gets the queries, keys and values that the rollout's core attention got, in place of
Megatron's own: then the core attentions are compared on equal inputs.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tools.pair.job import identity, weights_file
from tools.pair.readback import TKA1_ASKED, Asked
from tools.pair.side import PART, die_in, finish
from tools.pair.weights import same, to_checkpoint, to_megatron
from tracekit.contract import Role, SplitRequest
from tracekit.contract.boundary import INPUTS
from tracekit.contract.folder import RUN_SCHEMA, RunHead, write_head
from tracekit.engines import megatron_tiny as tiny
from tracekit.engines.megatron_backend import Tka1Attention
from tracekit.errors import BindingInvalid
from tracekit.model import AttentionCall, Bits, KVFamily
from tracekit.providers.torch_tensors import to_torch
from tracekit.recorder.api import record
from tracekit.store import open_trace

OWN = Asked("megatron.dot_product", SplitRequest())
"""Megatron-core as it comes on a CPU: matrix products and a softmax over all keys, in one piece."""

HEAD = RunHead(RUN_SCHEMA, Role.TRAIN, 1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.pair.training", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rollout", type=Path, help="the run folder of the rollout")
    parser.add_argument("--tka1", action="store_true", help="TKA-1 as core attention")
    parser.add_argument("--inject", action="store_true", help="queries, keys and values of the rollout")
    parser.add_argument("--dies", action="store_true", help="the process is killed in its second layer")
    given = parser.parse_args()
    folder: Path = given.folder
    with open_trace(given.rollout / "trace.h5") as trace:
        (request,) = trace.recording.requests
        tokens, calls = request.token_ids.tolist(), list(trace)
    try:
        write_head(folder, HEAD, identity(tokens))
    except BindingInvalid as refused:
        parser.error(str(refused))
    torch.set_num_threads(1)
    checkpoint = load_file(weights_file())
    with tiny.on_cpu():
        model = gpt(checkpoint, tka1=given.tka1)
        if given.inject:
            inject(model, calls)
        if given.dies:
            die_in(model.decoder.layers[1], 0)
        with record(folder / PART, engine="megatron", model=model) as session:
            step(model, tokens)
        loaded = {name: weight.detach() for name, weight in model.named_parameters()}
    if not same(to_checkpoint(loaded, model.config.num_query_groups, model.config.kv_channels), checkpoint):
        session.problems.append("the weights that ran are not those of the checkpoint")
    recorded = {INPUTS: "queries, keys and values of the rollout"} if given.inject else {}
    finish(folder, HEAD, TKA1_ASKED if given.tka1 else OWN, session.problems, recorded)


def gpt(checkpoint: dict[str, torch.Tensor], *, tka1: bool) -> Any:
    """Make the model of the checkpoint, in training mode."""
    model = tiny.gpt(
        core_attention=Tka1Attention if tka1 else None,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=32,
        ffn_hidden_size=256,
        layernorm_epsilon=1e-6,
    )
    model.load_state_dict(to_megatron(checkpoint, 2), strict=False)
    return model.train()


def step(model: Any, tokens: list[int]) -> None:
    """Forward and backward of next-token prediction."""
    ids = torch.tensor([tokens])
    logits = model(ids, torch.arange(len(tokens))[None], tiny.causal(len(tokens)))
    loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
    torch.autograd.backward(loss)


def inject(model: Any, calls: list[AttentionCall]) -> None:
    """Give the core attention of each layer the rows that the rollout's got.

    Gradients of a row go on to Megatron's own row in its place, so the backward runs through every layer.
    """
    for number, layer in enumerate(model.decoder.layers):
        rows = [rollout_rows(calls, number, name) for name in ("q", "keys", "values")]
        layer.self_attention.core_attention.register_forward_pre_hook(_replace(rows))


def rollout_rows(calls: list[AttentionCall], layer: int, name: str) -> torch.Tensor:
    """Return all rows of a layer `[S, 1, heads, D]`, as the rollout's launches got them."""
    mine = [call for call in calls if call.layer == layer]
    if name == "q":
        bits = np.concatenate([call.q.data for call in mine])[
            np.argsort(np.concatenate([call.rows.positions for call in mine]))
        ]
    else:
        last = max(mine, key=lambda call: call.step)
        bits = getattr(last.kv[last.rows.requests[0]][KVFamily.DENSE], name).data
    return to_torch(Bits(np.ascontiguousarray(bits[:, None]), mine[0].dtype))


def _replace(rows: list[torch.Tensor]) -> Callable[..., Any]:
    def hook(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        swapped = [own.clone() for own in given[:3]]
        for tensor, ours in zip(swapped, rows, strict=True):
            tensor.data.copy_(ours)  # through `.data`: the graph still ends at Megatron's own row
        return (*swapped, *given[3:])

    return hook


if __name__ == "__main__":
    main()
