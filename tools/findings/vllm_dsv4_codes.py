"""What vLLM's DeepSeek-V4 kernel for the CPU reads of each FP8 code: one key, no sink, so that O is the key.

Run it in the environment of `make test-engines`, as `python -m tools.findings.vllm_dsv4_codes`.
"""

import numpy as np
import torch

from tracekit.canonical import fp8
from tracekit.canonical.fp8_ds_mla import CODES, LatentPages, LatentStorage
from tracekit.model import Array, Bits, DType
from tracekit.providers.vllm_cpu_ops import operator
from tracekit.providers.vllm_dsv4 import HEAD_DIM, OPERATOR
from tracekit.providers.vllm_dsv4_cache import FP8

EXPONENT = 0x78
"""The bits of a code that hold its exponent; where all are 0 the number is subnormal, or zero."""


def read_codes(scale: int) -> tuple[Array, Array, Array]:
    """Return every finite code, its value under a scale, and the value that the kernel reads; `[448]`.

    Args:
        scale: UE8M0, `2 ** (scale - 127)`.
    """
    codes = np.zeros((1, CODES), np.uint8)
    codes[0, :254] = np.delete(np.arange(256), [0x7F, 0xFF])
    scales = np.full((1, 7), scale, np.uint8)
    stored = fp8.Stored(Bits(codes, FP8), scales, fp8.ScaleFormat.UE8M0, 64)
    pages = LatentPages(4, FP8)
    cache = pages.empty(1)
    pages.write(cache, [2], LatentStorage(stored, Bits(np.zeros((1, 64), np.uint16), DType.BFLOAT16)))
    out = torch.zeros(1, 1, HEAD_DIM, dtype=torch.bfloat16)
    slots = torch.full((1, 8), -1)
    slots[0, 0] = 2
    memory, none = torch.from_numpy(cache), slots[:, :0].contiguous()
    sink = torch.tensor([-torch.inf])
    operator(OPERATOR)(out, torch.zeros_like(out), memory, slots, 4, memory, none, 1, sink, 1.0)
    exact = stored.codes.to_float64() * stored.scale_of_each()
    return codes[0], exact[0], out[0, 0, :CODES].double().numpy()


def main() -> None:
    """Print the small codes, and how many of the others differ."""
    codes, values, read = read_codes(127)
    small = np.flatnonzero((codes[:254] & EXPONENT) == 0)
    print("code  value         the kernel reads")
    for at in small:
        print(f"0x{codes[at]:02x}  {values[at]:+.9f}  {read[at]:+.9f}")
    normal = np.setdiff1d(np.arange(254), small)
    print(f"of {normal.size} other codes {int((values[normal] != read[normal]).sum())} are read otherwise")


if __name__ == "__main__":
    main()
