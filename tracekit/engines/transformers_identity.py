"""Which transformers, torch and processor ran, and which model."""

import hashlib
import json
import platform
from pathlib import PurePath
from typing import Any

import torch
import transformers

from tracekit.model import ExecutedIdentity, Identity

_VOLATILE = {"_name_or_path", "transformers_version", "_attn_implementation", "attn_implementation", "dtype"}


def engine_name() -> str:
    """The engine and its version."""
    return f"transformers {transformers.__version__}"


def executed(kernel: str, device: str = "cpu") -> ExecutedIdentity:
    """Return what runs here under the name of a kernel, `transformers.sdpa`.

    torch chooses its CPU code by instruction set, and its matrix library uses more of them than torch's
    own kernels do; both are named, because either can change a bit.
    """
    libraries = {"torch": torch.__version__, "transformers": transformers.__version__}
    if device != "cpu":
        major, minor = torch.cuda.get_device_capability()
        hip = getattr(torch.version, "hip", None)
        return ExecutedIdentity(kernel, libraries, "hip" if hip else "cuda", f"sm_{major}{minor}")
    extra = [
        name
        for name, present in (
            ("avx512_bf16", torch.cpu._is_avx512_bf16_supported()),
            ("amx", torch.cpu._is_amx_tile_supported()),
        )
        if present
    ]
    isa = "+".join([torch.backends.cpu.get_cpu_capability().lower(), *extra])
    return ExecutedIdentity(kernel, libraries, "cpu", platform.machine(), isa)


def model_identity(model: Any) -> Identity:
    """Return name, architecture, and digests of weights and configuration.

    The weights digest covers name, dtype, shape and bytes of every parameter and buffer, in order of names.
    """
    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        weights.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    text = json.dumps(config, sort_keys=True, default=str)
    return Identity(
        model=PurePath(str(getattr(model.config, "_name_or_path", "") or "")).name,
        architecture=type(model).__name__,
        weights_digest=weights.hexdigest(),
        config_digest=hashlib.sha256(text.encode()).hexdigest(),
    )
