"""Which model made a trace."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch

from tracekit.model import Identity

VOLATILE = {"_name_or_path", "transformers_version", "_attn_implementation", "attn_implementation", "dtype"}


def model_identity(model: Any) -> Identity:
    """Return name, architecture, and digests of weights and configuration."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in VOLATILE}
    text = json.dumps(config, sort_keys=True, default=str)
    return Identity(
        model=PurePath(str(getattr(model.config, "_name_or_path", "") or "")).name,
        architecture=type(model).__name__,
        weights_digest=weights_digest(model.state_dict()),
        config_digest=hashlib.sha256(text.encode()).hexdigest(),
    )


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return SHA-256 over name, dtype, shape and bytes of every tensor, in order of names; hexadecimal."""
    weights = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        weights.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        weights.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return weights.hexdigest()
