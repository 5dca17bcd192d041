"""The processes that share one attention, and what they say to each other: arrays, over torch.distributed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tracekit.errors import UsageError
from tracekit.model import Array


@dataclass(frozen=True)
class World:
    """The place of this process among tensor-parallel and context-parallel ranks.

    Neighbouring ranks share a tensor-parallel group, as in Megatron's order `tp-cp`.

    Args:
        tp_rank: which heads.
        tp_size: ranks that share the heads.
        cp_rank: which tokens.
        cp_size: ranks that share the tokens.
        group: the ranks with the same heads, between which partial states go; None for one.
    """

    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    group: Any = None

    @classmethod
    def join(cls, tp_size: int, cp_size: int) -> "World":
        """Take this process's place in the default process group.

        Raises:
            UsageError: `U-WORLD` when the group has not `tp_size * cp_size` processes.
        """
        world, rank = dist.get_world_size(), dist.get_rank()
        if world != tp_size * cp_size:
            raise UsageError(
                f"tp {tp_size} and cp {cp_size} take {tp_size * cp_size} processes, and {world} are here.",
                rule="U-WORLD",
            )
        mine = None
        for tp in range(tp_size):  # every process makes every group, as torch asks
            members = list(range(tp, world, tp_size))
            group = dist.new_group(members, backend="gloo")
            mine = group if rank in members else mine
        return cls(rank % tp_size, tp_size, rank // tp_size, cp_size, mine)

    @property
    def backend(self) -> str:
        """What carries partial states, read back from the group; empty where nothing is carried."""
        return str(dist.get_backend(self.group)) if self.group is not None and self.cp_size > 1 else ""

    @property
    def effective_cp_size(self) -> int:
        """Ranks of the group that partial states really go around in."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def all_gather(self, array: Array) -> list[Array]:
        """Return the arrays of all context-parallel ranks, which may differ in their first axis only."""
        if self.effective_cp_size == 1:
            return [array]
        rows = torch.tensor([len(array)])
        counts = [torch.zeros_like(rows) for _ in range(self.effective_cp_size)]
        dist.all_gather(counts, rows, group=self.group)
        most = int(max(counts))
        padded = np.zeros((most, *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
        sent = torch.from_numpy(padded.view(np.uint8).reshape(-1))
        received = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(received, sent, group=self.group)
        whole = [part.numpy().view(array.dtype).reshape(padded.shape) for part in received]
        return [part[: int(count)] for part, count in zip(whole, counts, strict=True)]

    def all_gather_lists(self, arrays: Sequence[Array], axes: int, dtype: npt.DTypeLike) -> list[list[Array]]:
        """Return the arrays of all context-parallel ranks; a rank may have none.

        Args:
            arrays: of one shape, which is that of all ranks.
            axes: how many axes it has.
            dtype: of the arrays.
        """
        mine = np.array([arrays[0].shape if arrays else (0,) * axes], np.int64)
        shape = max(tuple(int(size) for size in one[0]) for one in self.all_gather(mine))
        stacked = np.stack(arrays) if arrays else np.zeros((0, *shape), dtype)
        return [list(part) for part in self.all_gather(stacked)]
