"""Start the ranks of a run as real processes over gloo, wait for them, and put their rows into one trace."""

import multiprocessing
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tools.binding.assemble import write_run_trace
from tools.binding.job import Job
from tools.binding.rank import run
from tracekit.contract import Role
from tracekit.contract.folder import RUN_SCHEMA, RunHead, write_head
from tracekit.contract.wire import dump


def launch(
    job: Job, role: Role, folder: Path, *, requested_cp: int | None = None, kill: int | None = None
) -> list[int]:
    """Run one side of a job and leave a run folder.

    Args:
        job: the work.
        role: which side.
        folder: the run folder, made here.
        requested_cp: the context-parallel size that was asked for, where it is not the one that runs.
        kill: a rank that dies in the middle, to show what is left then.

    Returns:
        The exit code of each process.
    """
    asked = job.cp if requested_cp is None else requested_cp
    write_head(folder, RunHead(RUN_SCHEMA, role, job.tp, asked), dump(job.identity()))
    world = job.tp * job.cp
    with tempfile.TemporaryDirectory() as shards:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tools.binding.rank"])  # torch is loaded once, before any thread is
        ranks = [
            context.Process(target=_one, args=(rank, world, job, role, folder, Path(shards), asked, kill))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        codes = _wait(ranks)
        if not any(codes):
            write_run_trace(job, role, folder, Path(shards))
    return codes


def _wait(ranks: list[multiprocessing.context.ForkServerProcess]) -> list[int]:
    """Wait for all; the peers of one that died are stopped, for they would wait for it in vain."""
    alive = list(ranks)
    while alive:
        ready = multiprocessing.connection.wait([rank.sentinel for rank in alive])
        ended = [rank for rank in alive if rank.sentinel in ready]
        alive = [rank for rank in alive if rank not in ended]
        for rank in ended:
            rank.join()
        if any(rank.exitcode for rank in ended):
            for rank in alive:
                rank.terminate()
    return [rank.exitcode or 0 for rank in ranks]


def _one(
    rank: int, world: int, job: Job, role: Role, folder: Path, shards: Path, asked: int, kill: int | None
) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    os.environ["TRACEKIT_THREADS"] = "1"
    if world > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{shards / 'meeting'}",
            rank=rank,
            world_size=world,
            timeout=timedelta(minutes=2),
        )
    run(job, role, folder, shards, asked, dies=rank == kill)
    if world > 1:
        dist.destroy_process_group()
