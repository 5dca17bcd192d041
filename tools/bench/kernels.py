"""TKA-1 on the CPU against torch SDPA, the better of bf16 and binary32, two threads each.

The ratio to each of the two stands beside the gated one, and that to a binary32 matmul of as many
operations. TKA-1 is binary32 by definition; on a processor with matrix units for bf16 (AMX) torch's bf16 does
several times the work per cycle. Where the better peer divided by the matmul is below the gate, no binary32
kernel of this machine reaches it.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom

from tools.bench.timing import Row, interleaved
from tracekit.providers import tka1

THREADS = 2
U16 = npt.NDArray[np.uint16]
MATMUL = "fp32 matmul"
Peers = dict[str, Callable[[], object]]


def rows(rounds: int) -> list[Row]:
    """Run the four shapes."""
    torch.set_num_threads(THREADS)
    rng = np.random.default_rng(0)
    shapes = [
        ("DSV4 T=16 K=512+128", dsv4(rng, 16), 16 * 64 * 640 * 512, 1.5, rounds),
        ("Qwen3 prefill T=512", causal(rng, 512, 512), 32 * 128 * 512 * 513 // 2, 1.4, rounds),
        ("Qwen3 T=512 R=4096", causal(rng, 512, 4096), 32 * 128 * 512 * 3840, 1.1, max(3, rounds // 3)),
        ("decode T=1 R=8192", causal(rng, 1, 8192), 32 * 128 * 8192, 1.5, rounds * 3),
    ]
    found = [
        against_torch(name, ours, peers, 4 * products, gate, turns)
        for name, (ours, peers), products, gate, turns in shapes
    ]
    shares = [
        replace(row, name=f"{row.name}: share", peer=row.peers[MATMUL], peer_name=MATMUL, gate=0.6, peers={})
        for row in found[:2]
    ]
    return found + shares


def against_torch(
    name: str, ours: Callable[[], object], peers: Peers, operations: int, gate: float, rounds: int
) -> Row:
    """Compare with the better peer; `peers` of the row also holds the matmul, scaled to `operations`."""
    size = 1536
    a, b = torch.rand(size, size), torch.rand(size, size)
    medians = interleaved({"": ours, **peers, MATMUL: lambda: a @ b}, rounds)
    medians[MATMUL] *= operations / (2 * size**3)
    best = min(peers, key=lambda peer: medians[peer])
    others = {peer: time for peer, time in medians.items() if peer}
    return Row(name, medians[""], medians[best], best, gate, others)


def dsv4(rng: np.random.Generator, rows: int) -> tuple[Callable[[], object], Peers]:
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

    return _ours(inputs), {"torch bf16": peer(torch.bfloat16), "torch fp32": peer(torch.float32)}


def causal(rng: np.random.Generator, rows: int, length: int) -> tuple[Callable[[], object], Peers]:
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

    return _ours(inputs), {"torch bf16": peer(torch.bfloat16), "torch fp32": peer(torch.float32)}


def _ours(inputs: tka1.Inputs) -> Callable[[], object]:
    return lambda: tka1.attention(inputs, form="native", threads=THREADS)


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> U16:
    bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _scale(dim: int) -> int:
    return int(np.float32(dim**-0.5).view(np.uint32))


def _tensor(bits: U16) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
