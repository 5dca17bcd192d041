"""Run as a program: the provider `vllm-triton` with vLLM's own kernel in Triton's interpreter. Prints JSON.

float16: the interpreter multiplies the words of bfloat16. `python -m tests.engines_vllm.triton_provider`
"""

import json
import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(  # type: ignore[assignment]
    driver=SimpleNamespace(is_active=lambda: True), compiler=None
)
torch.cuda.get_device_capability = lambda *_: (9, 0)

from tracekit.compare import Roundings, compare_envelope, envelope  # noqa: E402
from tracekit.model import DType  # noqa: E402
from tracekit.providers.base import Launch, roundings  # noqa: E402
from tracekit.providers.vllm_triton import VllmTriton  # noqa: E402
from tracekit.testing import dense_call  # noqa: E402


class Interpreted(VllmTriton):
    """In host memory."""

    device = "cpu"


def main() -> None:
    provider = Interpreted()
    found = []
    for options in (
        {"lengths": (9, 21), "new": (9, 3)},
        {"lengths": (40,), "window": 7, "sink": True},
        {"lengths": (33, 5), "new": (1, 1), "heads": 8, "kv_heads": 2},
    ):
        call = dense_call(dtype=DType.FLOAT16, head_dim=32, seed=4, **options)
        assert provider.refuses(call) is None
        (tensors,) = provider.run(Launch((call,))).tensors
        bound = envelope(call, Roundings(*roundings(provider, call)))
        bounded = compare_envelope(call, bound, tensors.out, tensors.lse)
        found.append([bounded.inside.compared.elements, bounded.outside.first is None])
    print(json.dumps({"found": found, "kernel": provider.identity().kernel}))


if __name__ == "__main__":
    main()
