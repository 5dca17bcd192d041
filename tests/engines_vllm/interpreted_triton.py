"""Import before vllm: what vLLM 0.32 lacks to run DeepSeek-V4 on a CPU without a Triton compiler for it.

1. There is no triton-cpu on the package index. The kernels that build the metadata of a step run in Triton's
   own interpreter; no kernel of the forward is written in Triton there.
2. The builder of the window's metadata asks its CPU class for the plans of two layer types (`c1a`, `c2a`)
   that the class does not list. On the CPU every plan is None.

It changes the process that imports it, so DeepSeek-V4 runs in a process of its own.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

from typing import Any

import triton.backends


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver = _Driver
    compiler = None


triton.backends.backends["cpu"] = _Backend


def complete_metadata() -> None:
    """Add the missing layer types; once vLLM can be imported."""
    import vllm.v1.attention.backends.mla.sparse_swa as window
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as Builder

    types = [value for name, value in vars(window).items() if name.startswith("_LAYER_TYPE_")]

    def build_tile_scheduler(self: Any, num_decode_tokens: int) -> dict[str, None]:
        return dict.fromkeys(types)

    Builder.build_tile_scheduler = build_tile_scheduler
