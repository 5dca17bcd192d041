"""Run as a program: vLLM on the CPU with its Triton implementation, in Triton's interpreter. Prints JSON.

There is no Triton for the CPU, so vLLM is told that its interpreter is one. The CPU platform always takes the
entry CPU_ATTN of the registry, so that entry is vLLM's own Triton backend here. The cache writer asks for the
generation of a GPU, and is answered. Kernels, metadata and engine are vLLM's. float16: the interpreter gets
bfloat16 wrong.

`python -m tests.engines_vllm.triton_engine MODEL OUT [a wrong window]`
"""

import json
import os
import sys
from types import SimpleNamespace

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}

import torch
import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(  # type: ignore[assignment]
    driver=SimpleNamespace(is_active=lambda: True), compiler=None
)
torch.cuda.get_device_capability = lambda *_: (9, 0)

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # noqa: E402

from tests.engines_vllm.tiny_engine import engine, generate  # noqa: E402
from tracekit.engines import vllm_gpu  # noqa: E402
from tracekit.recorder.api import record  # noqa: E402

TRITON = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"


def main(model: str, out: str, wrong_window: bool) -> None:
    register_backend(AttentionBackendEnum.CPU_ATTN, TRITON)
    if wrong_window:
        vllm_gpu.window_from_left = lambda left: None if left < 0 else left // 2
    llm = engine(model, dtype="float16")
    prompts = [[3 + 7 * i % 250 for i in range(count)] for count in (70, 9)]
    with record(out, engine="vllm", llm=llm) as session:
        tokens = generate(llm, prompts, 3)
    print(json.dumps({"tokens": tokens, "problems": list(session.problems), "notes": session.notes}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], len(sys.argv) > 3)
