"""A Qwen3 checkpoint in the words of Megatron-core, and back: what was trained on is hashed after it ran."""

import re
from collections.abc import Mapping

import torch

Tensors = dict[str, torch.Tensor]

_SAME = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}
"""Tensors that are the same in both, by their name in the checkpoint; those of a layer without its prefix."""

_QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_GATED = ("mlp.gate_proj.weight", "mlp.up_proj.weight")


def to_megatron(checkpoint: Mapping[str, torch.Tensor], groups: int) -> Tensors:
    """Return the parameters of a `GPTModel`.

    Args:
        checkpoint: of a Qwen3 in the names of transformers.
        groups: KV heads; Megatron keeps the rows of Q, K and V of one group beside each other.
    """
    found = {}
    for name, tensor in checkpoint.items():
        prefix, own = _layer(name, "model.layers")
        if own in _SAME:
            found[prefix.replace("model.layers", "decoder.layers") + _SAME[own]] = tensor
    for prefix in sorted({_layer(name, "model.layers")[0] for name in checkpoint} - {""}):
        there = prefix.replace("model.layers", "decoder.layers")
        q, k, v = (checkpoint[prefix + name].chunk(groups) for name in _QKV)
        rows = [part for group in zip(q, k, v, strict=True) for part in group]
        found[there + "self_attention.linear_qkv.weight"] = torch.cat(rows)
        found[there + "mlp.linear_fc1.weight"] = torch.cat([checkpoint[prefix + name] for name in _GATED])
    return found


def to_checkpoint(parameters: Mapping[str, torch.Tensor], groups: int, head_dim: int) -> Tensors:
    """Return the checkpoint of a model's parameters: the inverse of `to_megatron`."""
    found = {}
    back = {theirs: ours for ours, theirs in _SAME.items()}
    for name, tensor in parameters.items():
        prefix, own = _layer(name, "decoder.layers")
        here = prefix.replace("decoder.layers", "model.layers")
        if own in back:
            found[here + back[own]] = tensor
        elif own == "self_attention.linear_qkv.weight":
            q_rows = len(tensor) // groups - 2 * head_dim
            of_group = [torch.split(part, [q_rows, head_dim, head_dim]) for part in tensor.chunk(groups)]
            for at, ours in enumerate(_QKV):
                found[here + ours] = torch.cat([parts[at] for parts in of_group])
        elif own == "mlp.linear_fc1.weight":
            found |= {here + ours: half for ours, half in zip(_GATED, tensor.chunk(2), strict=True)}
    return found


def same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    """Whether two checkpoints are equal in every bit."""
    return ours.keys() == theirs.keys() and all(
        tensor.dtype is theirs[name].dtype
        and torch.equal(tensor.contiguous().view(torch.int16), theirs[name].contiguous().view(torch.int16))
        for name, tensor in ours.items()
    )


def _layer(name: str, layers: str) -> tuple[str, str]:
    """The prefix of a layer, empty where there is none, and the rest of the name."""
    found = re.match(rf"({re.escape(layers)}\.\d+\.)(.*)", name)
    return ("", name) if found is None else (found[1], found[2])
