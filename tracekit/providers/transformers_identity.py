"""Which transformers, torch and processor run here, as far as they can change a bit."""

import platform

import torch
import transformers

from tracekit.model import ExecutedIdentity


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
