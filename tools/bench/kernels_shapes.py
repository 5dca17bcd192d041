"""The four shapes, timed in this process: TKA-1, torch SDPA in bf16 and in binary32, and a binary32 matmul.

`python -m tools.bench.kernels_shapes ROUNDS` prints the medians as JSON. Which instructions a library
uses is decided when it is loaded, so tools/bench/kernels.py runs this in a process of its own.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom

from tools.bench.timing import interleaved
from tracekit.providers import tka1

THREADS = 2
U16 = npt.NDArray[np.uint16]
MATMUL = "fp32 matmul"
Peers = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Shape:
    """A launch, torch's answers to it, and the products of a query and a key number that it takes."""

    name: str
    inputs: tka1.Inputs
    peers: Peers
    products: int


@dataclass(frozen=True)
class Times:
    """Medians in seconds; the matmul is scaled to the operations of the shape."""

    name: str
    ours: float
    peers: dict[str, float]
    matmul: float


def shapes() -> list[Shape]:
    """Make the four shapes, the same ones every time."""
    rng = np.random.default_rng(0)
    return [
        Shape("DSV4 T=16 K=512+128", *dsv4(rng, 16), 16 * 64 * 640 * 512),
        Shape("Qwen3 prefill T=512", *causal(rng, 512, 512), 32 * 128 * 512 * 513 // 2),
        Shape("Qwen3 T=512 R=4096", *causal(rng, 512, 4096), 32 * 128 * 512 * 3840),
        Shape("decode T=1 R=8192", *causal(rng, 1, 8192), 32 * 128 * 8192),
    ]


def times(shape: Shape, rounds: int) -> Times:
    """Time a shape: the long one in fewer rounds, the short one in more."""
    size = 1536
    a, b = torch.rand(size, size), torch.rand(size, size)
    ours = {"": lambda: tka1.attention(shape.inputs, form="native", threads=THREADS)}
    turns = {"Qwen3 T=512 R=4096": max(5, rounds // 2), "decode T=1 R=8192": rounds * 3}
    medians = interleaved({**ours, **shape.peers, MATMUL: lambda: a @ b}, turns.get(shape.name, rounds))
    matmul = medians.pop(MATMUL) * 4 * shape.products / (2 * size**3)
    return Times(shape.name, medians.pop(""), medians, matmul)


def dsv4(rng: np.random.Generator, rows: int) -> tuple[tka1.Inputs, Peers]:
    """64 heads share one kv head of 512, keys are values; 512 listed rows and a window of 128.

    The peer gets the gathered rows without a sink, which is less work than ours.
    """
    heads, dim, listed, window, length = 64, 512, 512, 128, 2048
    q, far, near = (_random(rng, s) for s in ((rows, heads, dim), (length, 1, dim), (length, 1, dim)))
    ids = np.stack([rng.choice(length, listed, replace=False) for _ in range(rows)]).astype(np.int64)
    hi = 1000 + np.arange(rows, dtype=np.int64)
    families = (
        tka1.FamilyInput(
            (far,), (far,), (0,), tka1.Lists(ids.ravel(), np.arange(rows + 1, dtype=np.int64) * listed)
        ),
        tka1.FamilyInput((near,), (near,), (0,), tka1.Ranges(hi - window, hi)),
    )
    sink = np.zeros(heads, np.uint32)
    inputs = tka1.Inputs(q, np.zeros(rows, np.int32), families, sink, _scale(dim))

    both = _tensor(np.concatenate([far, near])[:, 0])
    place = torch.from_numpy(np.concatenate([ids, length + hi[:, None] - window + np.arange(window)], 1))

    def peer(dtype: torch.dtype) -> Callable[[], object]:
        query, table = _tensor(q).to(dtype)[:, None], both.to(dtype)

        def run() -> object:
            kv = table[place][:, None]
            return F.scaled_dot_product_attention(query, kv, kv, scale=dim**-0.5)

        return run

    return inputs, {"torch bf16": peer(torch.bfloat16), "torch fp32": peer(torch.float32)}


def causal(rng: np.random.Generator, rows: int, length: int) -> tuple[tka1.Inputs, Peers]:
    """32 heads on 8 kv heads of 128; query row t sees the first `length - rows + 1 + t` rows."""
    heads, kv_heads, dim = 32, 8, 128
    q, k, v = (_random(rng, s) for s in ((rows, heads, dim), *[(length, kv_heads, dim)] * 2))
    hi = length - rows + 1 + np.arange(rows, dtype=np.int64)
    family = tka1.FamilyInput((k,), (v,), (0,), tka1.Ranges(np.zeros(rows, np.int64), hi))
    inputs = tka1.Inputs(q, np.zeros(rows, np.int32), (family,), None, _scale(dim))
    mask = (
        None
        if rows == 1 or rows == length
        else torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    )

    def peer(dtype: torch.dtype) -> Callable[[], object]:
        query, keys, values = (_tensor(x).to(dtype).transpose(0, 1)[None].contiguous() for x in (q, k, v))
        return lambda: F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=rows == length, enable_gqa=True
        )

    return inputs, {"torch bf16": peer(torch.bfloat16), "torch fp32": peer(torch.float32)}


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> U16:
    bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _scale(dim: int) -> int:
    return int(np.float32(dim**-0.5).view(np.uint32))


def _tensor(bits: U16) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    print(json.dumps([asdict(times(shape, int(sys.argv[1]))) for shape in shapes()]))
