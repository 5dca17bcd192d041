"""The backward of TKA-1 over context-parallel ranks (docs/tka1.md, S16).

Whoever owns keys gets all queries, their dO and their merged rows before S10. It then has every term of dK
and dV of its keys, and of dQ the nodes of its own leaves, which go back and merge like the partials did.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.canonical.owners import Owner
from tracekit.model import Array
from tracekit.parallel.attention import Held, Queries, Shape, launch, runs_of
from tracekit.parallel.world import World
from tracekit.providers import tka1


@dataclass(frozen=True, eq=False)
class HeldGradients:
    """The gradients of one block of keys and values, binary32 bits of the shapes of its rows."""

    keys: Array
    values: Array


@dataclass(frozen=True, eq=False)
class Gradients:
    """What a rank gets.

    Args:
        d_q: binary32 bits `[T, H, D]` of its own rows.
        held: one a block that it holds.
    """

    d_q: Array
    held: list[HeldGradients]


def backward(
    world: World,
    owners: Sequence[Owner],
    queries: Queries,
    d_out: Array,
    rows: tka1.Partials,
    held: list[Held],
    shape: Shape,
) -> Gradients:
    """Compute the gradients of one request over all ranks of the world's context-parallel group.

    Args:
        world: this process's place.
        owners: by rank, who owns which keys.
        queries: the rows of this rank.
        d_out: bits `[T, H, Dv]` of their dO, in the dtype of the launch.
        rows: their merged rows before S10, as `Executed.rows()`.
        held: the blocks of this rank.
        shape: what all ranks know.
    """
    everyone = _Everyone(
        Queries(
            *(_all(world, column) for column in (queries.q, queries.positions, queries.first, queries.end))
        ),
        _all(world, d_out),
        tka1.Partials(_all(world, rows.acc), _all(world, rows.l), _all(world, rows.m)),
    )
    first = sum(len(p) for p in world.all_gather(queries.positions)[: world.cp_rank])
    mine = slice(first, first + len(queries.q))
    runs, sums = runs_of(owners), list[Array]()
    found = [HeldGradients(*(np.zeros(x.shape, np.uint32) for x in (h.keys, h.values))) for h in held]
    for run in runs[world.cp_rank]:
        number, low, high = _place(held, run)
        part = Held(held[number].start + low, held[number].keys[low:high], held[number].values[low:high])
        d_q, d_keys, d_values = everyone.of(part, shape)
        sums.append(d_q)
        found[number].keys[low:high], found[number].values[low:high] = d_keys, d_values
    sent = world.all_gather_lists(sums, 3, np.uint32)
    keyed = [
        (run.key, part[mine])
        for theirs, parts in zip(runs, sent, strict=True)
        for run, part in zip(theirs, parts, strict=True)
    ]
    merged = tka1.merge_sums(sorted(keyed, key=lambda part: part[0]))
    return Gradients(merged, found)


@dataclass(frozen=True, eq=False)
class _Everyone:
    """The rows of all ranks of the group."""

    queries: Queries
    d_out: Array
    rows: tka1.Partials

    def of(self, held: Held, shape: Shape) -> tuple[Array, Array, Array]:
        """Return dQ of all rows over the keys of one node, unfinished, and dK and dV of those keys."""
        asked = tka1.Backward(
            launch(self.queries, held, shape),
            self.queries.positions,
            self.d_out,
            shape.dtype,
            self.rows,
            unfinished=True,
        )
        gradients = tka1.backward(asked)
        (family,) = gradients.families
        d_keys, d_values = (tka1.merge_sums([(0, part[0])]) for part in (family.keys, family.values))
        return gradients.d_q, d_keys, d_values


def _place(held: Sequence[Held], run: tka1.Run) -> tuple[int, int, int]:
    """Return which block holds a node, and which of its rows."""
    low, high = run.rows
    number = next(n for n, block in enumerate(held) if block.range[0] <= low < block.range[1])
    start, stop = held[number].range
    return number, low - start, min(high, stop) - start


def _all(world: World, array: Array) -> Array:
    return np.concatenate(world.all_gather(array))
