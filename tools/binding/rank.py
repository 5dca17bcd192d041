"""One rank of a run: it computes its part, then says what it executed."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch.distributed as dist

from tools.binding.job import Job
from tools.binding.merging import merging
from tools.binding.pages import Pages
from tracekit import __version__
from tracekit.contract import (
    AttentionRuntimeReadback,
    Coordinate,
    Core,
    Knob,
    PlanEntry,
    Role,
    Sharding,
    SplitExecution,
    SplitMode,
    SplitRequest,
    State,
)
from tracekit.contract.folder import RankFile, write_rank
from tracekit.contract.readback import core_id
from tracekit.contract.reduction import schedule
from tracekit.contract.shards import Piece, digests
from tracekit.model import Array, Bits, DType, ReductionSpec
from tracekit.parallel.attention import Executed, Held, Queries, attend
from tracekit.parallel.backward import backward
from tracekit.parallel.world import World
from tracekit.providers.portable import Tka1
from tracekit.providers.tka1 import LEAF

SPLIT = SplitRequest(SplitMode.FIXED, LEAF)


@dataclass
class Shard:
    """What a rank holds of one side: by layer and tensor, `[n, heads, ...]` at its own tokens, ascending."""

    job: Job
    world: World
    tensors: dict[tuple[int, str], Array] = field(default_factory=dict)
    merged: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    reductions: set[ReductionSpec] = field(default_factory=set)
    dtypes: set[DType] = field(default_factory=set)
    modes: list[str] = field(default_factory=list)

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """The tokens of this rank."""
        return self.job.owners[self.world.cp_rank].ranges

    @property
    def tokens(self) -> Array:
        """The tokens of this rank, ascending."""
        return np.concatenate([np.arange(*block) for block in self.blocks] or [np.zeros(0, int)]).astype(
            np.int64
        )

    def part(self, layer: int, name: str, tokens: Array, launch: int = 0) -> Array:
        """Return this rank's heads of an input, computed in the launch that begins at a token."""
        whole, settings = self.job.raw(layer, name), self.job.settings
        heads = whole.shape[1] // self.world.tp_size
        mine = whole[tokens, self.world.tp_rank * heads : (self.world.tp_rank + 1) * heads]
        if name in ("v", "d_out"):
            return settings.plain(mine)
        factor = settings.query_factor(self.job.head_dim) if name == "q" else 1.0
        return settings.rows(mine, tokens, launch, factor=factor)

    def queries(self, layer: int, tokens: Array, start: int, stop: int) -> Queries:
        """Return this rank's rows of a launch of tokens `start .. stop - 1`."""
        first, end = self.job.settings.seen(tokens, stop)
        return Queries(self.part(layer, "q", tokens, start), tokens, first, end)

    def keep(self, layer: int, asked: Queries, ran: Executed, rows: Array | None = None) -> None:
        """Take over a launch and its answer; `rows` picks those of this rank, all of them where absent."""
        seen = np.stack([asked.first, asked.end], axis=1)
        for name, bits in (
            ("q", asked.q),
            ("seen", seen),
            ("out", ran.outputs.out),
            ("lse", ran.outputs.lse),
        ):
            before = [self.tensors[layer, name]] if (layer, name) in self.tensors else []
            self.tensors[layer, name] = np.concatenate([*before, bits if rows is None else bits[rows]])
        self.merged = ran.merged
        self.reductions.add(ran.reduction)
        self.dtypes.add(ran.dtype)

    def hold(self, layer: int, held: list[Held]) -> None:
        """Take over the keys and values that were read of this rank's blocks."""
        for name, rows in (("keys", [h.keys for h in held]), ("values", [h.values for h in held])):
            empty = self.part(layer, "k", np.zeros(0, np.int64))
            self.tensors[layer, name] = np.concatenate([empty, *rows])

    def has(self, *names: str) -> bool:
        """Whether every layer holds a row of these tensors for each token of this rank, and no other row."""
        held = [self.tensors.get((layer, name)) for layer in range(self.job.layers) for name in names]
        return all(rows is not None and len(rows) == len(self.tokens) for rows in held)

    @property
    def reduction(self) -> ReductionSpec | None:
        """How every launch merged; None where they did not merge alike."""
        return next(iter(self.reductions)) if len(self.reductions) == 1 else None


def train(shard: Shard) -> None:
    """The whole sequence in one launch a layer, forward and backward; each rank merges its own rows."""
    job, world = shard.job, shard.world
    shard.modes.append("training")
    for layer in range(job.layers):
        keys, values = (shard.part(layer, name, np.arange(job.tokens)) for name in ("k", "v"))
        held = [Held(start, keys[start:stop], values[start:stop]) for start, stop in shard.blocks]
        queries = shard.queries(layer, shard.tokens, 0, job.tokens)
        ran = attend(world, job.owners, queries, held, job.shape, merge=merging(job.settings))
        shard.keep(layer, queries, ran)
        shard.hold(layer, held)
        d_out = shard.part(layer, "d_out", shard.tokens)
        grads = backward(world, job.owners, queries, d_out, ran.rows(), held, job.shape)
        none = np.zeros((0, *keys.shape[1:]), np.uint32)
        shard.tensors[layer, "d_out"], shard.tensors[layer, "d_q"] = d_out, grads.d_q
        shard.tensors[layer, "d_keys"] = np.concatenate([none, *(part.keys for part in grads.held)])
        shard.tensors[layer, "d_values"] = np.concatenate([none, *(part.values for part in grads.held)])


def roll_out(shard: Shard) -> None:
    """Chunks of the prompt, then one token at a time, from paged KV; every rank merges every row."""
    job, world = shard.job, shard.world
    heads = job.kv_heads // world.tp_size
    pages = [
        Pages(shard.blocks, job.page, heads, job.head_dim, job.seed + layer) for layer in range(job.layers)
    ]
    for start, stop in job.launches():
        mode = "chunked_prefill" if stop <= job.prompt else "decode"
        shard.modes += [mode] * (mode not in shard.modes)
        positions = np.arange(start, stop, dtype=np.int64)
        mine = np.flatnonzero(np.isin(positions, shard.tokens))
        for layer in range(job.layers):
            pages[layer].write(start, *(shard.part(layer, name, positions, start) for name in ("k", "v")))
            if job.settings.cache == "overwritten":
                pages[layer].overwrite(3)
            held = pages[layer].read(stop, swapped=job.settings.pages == "swapped")
            queries = shard.queries(layer, positions, start, stop)
            ran = attend(
                world, job.owners, queries, held, job.shape, everywhere=True, merge=merging(job.settings)
            )
            shard.keep(layer, queries, ran, mine)
            if stop == job.tokens:
                shard.hold(layer, held)


def readback(shard: Shard, role: Role, requested_cp: int) -> AttentionRuntimeReadback:
    """What this rank executed, from what it holds now and from the group that it talked in."""
    job, world, ran = shard.job, shard.world, Tka1().identity()
    effective = world.effective_cp_size
    applied = effective == requested_cp
    knob = Knob(
        str(requested_cp),
        str(effective),
        State.APPLIED if applied else State.FALLBACK,
        "" if applied else f"{effective} ranks exchanged partial states",
    )
    q_heads, kv_heads = (shard.tensors[0, name].shape[1] for name in ("q", "keys"))
    return AttentionRuntimeReadback(
        role=role,
        engine=f"tracekit {__version__}",
        modes=tuple(shard.modes),
        dtype=", ".join(sorted(shard.dtypes)),
        sharding=Sharding(
            tp_rank=world.tp_rank,
            tp_world_size=world.tp_size,
            cp_rank=world.cp_rank,
            cp_world_size=world.cp_size,
            global_q_heads=q_heads * world.tp_size,
            global_kv_heads=kv_heads * world.tp_size,
            local_q_head_start=world.tp_rank * q_heads,
            local_q_heads=q_heads,
            local_kv_head_start=world.tp_rank * kv_heads,
            local_kv_heads=kv_heads,
            global_sequence_length=job.tokens,
            blocks=shard.blocks,
        ),
        reduction=shard.reduction,
        reduction_engine=ran.kernel,
        split_kv=SPLIT,
        effective_cp_world_size=effective,
        export_lse=shard.has("lse"),
        lse_base="e" if shard.has("lse") else "",
        core=Core(
            core_id=core_id(ran),
            schedule=schedule(shard.reduction) if shard.reduction else "",
            actual_backend=ran.kernel,
            communication_backend=world.backend,
        ),
        scope_verified=shard.has("q", "out", "keys", "values"),
        knobs={"context_parallel_size": knob},
        recorded={"launches": str(len(job.launches()) if role is Role.INFER else 1)},
    )


def leave(shard: Shard, role: Role, requested_cp: int, folder: Path) -> None:
    """Write what this rank executed and a digest of what it holds."""
    told, ran = readback(shard, role, requested_cp), shard.reduction
    plans = () if ran is None else tuple(_plans(shard, ran, told.core.actual_backend))
    write_rank(folder, RankFile(told, (shard.job.tokens,), plans, digests(shard_pieces(shard))))


def _plans(shard: Shard, ran: ReductionSpec, backend: str) -> Iterator[PlanEntry]:
    """Yield what this rank merged of each owner."""
    for owner, cuts in shard.merged.items():
        place = Coordinate(0, shard.world.tp_rank, shard.world.cp_rank, owner)
        fixed = SplitMode.FIXED, LEAF, cuts
        done = SplitExecution(SPLIT, *fixed, ran.order, ran.accumulate, ran.downcast, backend)
        yield PlanEntry(place, told_blocks(cuts), done)


def told_blocks(boundaries: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return the ranges that boundaries cover: what an owner held, as it came to be merged."""
    found: list[tuple[int, int]] = []
    for start, stop in boundaries:
        if found and found[-1][1] == start:
            start, _ = found.pop()
        found.append((start, stop))
    return tuple(found)


def shard_pieces(shard: Shard) -> Iterator[Piece]:
    """Yield what this rank holds, for its digests."""
    for (layer, name), bits in shard.tensors.items():
        if name != "seen":
            kind = shard.job.settings.dtype if bits.dtype == np.uint16 else DType.FLOAT32
            yield name, layer, shard.job.key, Bits(bits, kind)


def run(job: Job, role: Role, folder: Path, shards: Path, asked: int, *, dies: bool = False) -> None:
    """Run this process's rank of a job in the default process group, and leave its files."""
    world = World.join(job.tp, job.cp) if dist.is_initialized() else World(0, 1, 0, 1)
    shard = Shard(job, world)
    (train if role is Role.TRAIN else roll_out)(shard)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    tensors = {f"{layer}.{name}": bits for (layer, name), bits in shard.tensors.items()}
    np.savez(shards / f"tp{world.tp_rank}-cp{world.cp_rank}.npz", **tensors)  # type: ignore[arg-type]
    leave(shard, role, asked, folder)
