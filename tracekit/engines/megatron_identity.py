"""Which Megatron model made a trace."""

import hashlib
import json
from dataclasses import fields
from typing import Any

import torch

from tracekit.engines.transformers_identity import weights_digest
from tracekit.model import Identity


def model_identity(model: torch.nn.Module, *, weights: bool = True) -> Identity:
    """Return architecture and digests of weights, as they are now, and of the `TransformerConfig`.

    Weights are those of this rank. Fields of the configuration that are no plain values count by name.

    Args:
        model: the language model.
        weights: whether to hash the weights.
    """
    tensors = {
        name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)
    }
    config = getattr(model, "config", None)
    plain = (
        {}
        if config is None
        else {field.name: _plain(getattr(config, field.name)) for field in fields(config)}
    )
    text = json.dumps(plain, sort_keys=True)
    return Identity(
        architecture=type(model).__name__,
        weights_digest=weights_digest(tensors) if weights else "",
        config_digest=hashlib.sha256(text.encode()).hexdigest(),
    )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
