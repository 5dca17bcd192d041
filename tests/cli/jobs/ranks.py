"""One process of a torchrun job: a tensor-parallel attention layer over gloo, recorded by hand.

Every process has the query, key and value weights of its heads. The first one also runs the whole layer, as
one process would, into a trace of its own.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tracekit
from tracekit.model import Share

folder = Path(sys.argv[1])
HEADS, KV_HEADS, DIM, WIDTH, TOKENS = 4, 2, 16, 32, 6
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
generator = torch.Generator().manual_seed(7)
hidden, wq, wk, wv = (
    torch.randn(*shape, generator=generator)
    for shape in ((TOKENS, WIDTH), (HEADS, WIDTH, DIM), (KV_HEADS, WIDTH, DIM), (KV_HEADS, WIDTH, DIM))
)


def layer(path, heads, kv_heads, share):
    """The attention of some heads, head by head, so that its bits do not depend on how many there are."""
    q, k, v = (
        torch.stack([hidden @ weight for weight in part]).to(torch.bfloat16)
        for part in (wq[heads], wk[kv_heads], wv[kv_heads])
    )
    group = len(q) // len(k)
    out = torch.stack(
        [
            torch.nn.functional.scaled_dot_product_attention(
                q[h, None, None], k[h // group, None, None], v[h // group, None, None], is_causal=True
            )[0, 0]
            for h in range(len(q))
        ]
    )
    with tracekit.record(path, share=share) as session, session.step({"a": list(range(3, 3 + TOKENS))}):
        session.attention(
            layer=0,
            q=q.transpose(0, 1),
            keys=k.transpose(0, 1),
            values=v.transpose(0, 1),
            out=out.transpose(0, 1),
            scale=DIM**-0.5,
            kv_source="consumed",
            kernel="sdpa",
        )
    return out


part = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
mine = layer(
    folder / f"part{rank}.h5",
    part,
    slice(rank * KV_HEADS // world, (rank + 1) * KV_HEADS // world),
    Share(rank, world, tensor=rank, tensor_size=world, kv_heads=KV_HEADS),
)
outs = [torch.empty_like(mine) for _ in range(world)]
dist.all_gather(outs, mine.contiguous())
if rank == 0:
    whole = layer(folder / "whole.h5", slice(0, HEADS), slice(0, KV_HEADS), None)
    assert torch.equal(torch.cat(outs), whole)
dist.destroy_process_group()
