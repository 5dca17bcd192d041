"""What runs here when torch's own kernels do the arithmetic of an engine, as far as it can change a bit."""

import platform
from collections.abc import Mapping

import torch

from tracekit.model import ExecutedIdentity


def executed_by_torch(kernel: str, libraries: Mapping[str, str], device: str = "cpu") -> ExecutedIdentity:
    """Return the identity of a kernel that is made of torch's operations.

    torch chooses its CPU code by instruction set, and its matrix library uses more of them than torch's
    own kernels do; both are named, because either can change a bit.

    Args:
        kernel: its name, `transformers.sdpa`.
        libraries: package -> version of what calls torch; torch's own is added.
        device: `cpu`, or what torch calls the accelerator.
    """
    libraries = {"torch": torch.__version__, **libraries}
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
