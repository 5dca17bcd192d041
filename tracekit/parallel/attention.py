"""TKA-1 over context-parallel ranks: each owner computes the nodes of its own keys, each consumer merges.

Queries go to all owners, partial states `(acc, l, M)` in FP32 come back, and they merge in the order of the
leaves, whichever arrived first: the bits are those of one process that holds everything.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.canonical.owners import Owner, check_owners
from tracekit.model import TKA1_REDUCTION, Array, DType, ReductionSpec
from tracekit.parallel.world import World
from tracekit.providers import tka1

Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Held:
    """One block of keys and values of one request that a rank owns: tokens `start ..`.

    Args:
        start: token of row 0.
        keys: bits `[n, Hkv, D]`.
        values: bits `[n, Hkv, Dv]`.
    """

    start: int
    keys: Array
    values: Array

    @property
    def range(self) -> Range:
        """The tokens held, `start .. end - 1`."""
        return self.start, self.start + len(self.keys)


@dataclass(frozen=True, eq=False)
class Queries:
    """Query rows of one request.

    Args:
        q: bits `[T, H, D]`.
        positions: int64 `[T]`.
        first: int64 `[T]`, the first key that each row sees.
        end: int64 `[T]`, the key after the last; causal attention ends behind a row's own position.
    """

    q: Array
    positions: Array
    first: Array
    end: Array

    @classmethod
    def causal(cls, q: Array, positions: Array) -> "Queries":
        """Return rows that see every key up to their own."""
        return cls(q, positions, np.zeros_like(positions), positions + 1)


@dataclass(frozen=True, eq=False)
class Executed:
    """What ran, told by those that ran it.

    Args:
        merged: owner -> the token ranges of the leaves whose nodes this rank merged, ascending.
        outputs: the answer.
        parts: the nodes of all owners, of the rows of this rank.
        reduction: how they became the answer, told by what merged them.
        dtype: of queries, keys, values and O.
    """

    merged: dict[int, tuple[Range, ...]]
    outputs: tka1.Outputs
    parts: dict[tka1.Run, tka1.Partials]
    reduction: ReductionSpec
    dtype: DType

    def rows(self) -> tka1.Partials:
        """Return the merged rows before S10, for the backward."""
        return tka1.merge_rows(self.parts)


@dataclass(frozen=True)
class Shape:
    """What all ranks know of a launch.

    Args:
        scale_bits: binary32 bits of the factor of a score.
        dtype: of queries, keys, values and O.
    """

    scale_bits: int
    dtype: DType = DType.BFLOAT16


def launch(queries: Queries, held: Held, shape: Shape) -> tka1.Inputs:
    """Return the launch of queries on one block: each row sees its keys that are there."""
    selection = tka1.Ranges(
        *(np.clip(edge, *held.range).astype(np.int64) for edge in (queries.first, queries.end))
    )
    family = tka1.FamilyInput((held.keys,), (held.values,), (held.start,), selection)
    request = np.zeros(len(queries.q), np.int32)
    return tka1.Inputs(queries.q, request, (family,), None, shape.scale_bits, shape.dtype)


NODE = (("acc", (3, np.uint32)), ("l", (2, np.uint32)), ("m", (2, np.int32)))
"""The arrays of a partial state, their axes and dtypes (docs/tka1.md, S14)."""

Merge = Callable[[dict[tka1.Run, tka1.Partials], DType], tuple[tka1.Outputs, ReductionSpec]]
"""How the nodes of all owners become an answer; it says itself what it did."""


def merged_by_tree(parts: dict[tka1.Run, tka1.Partials], dtype: DType) -> tuple[tka1.Outputs, ReductionSpec]:
    """Merge as TKA-1 does: in the order of the leaves, in FP32, in the aligned tree, with one downcast."""
    return tka1.merge(parts, None, dtype), TKA1_REDUCTION


def attend(
    world: World,
    owners: Sequence[Owner],
    queries: Queries,
    held: list[Held],
    shape: Shape,
    *,
    everywhere: bool = False,
    merge: Merge = merged_by_tree,
) -> Executed:
    """Compute the attention of one request over all ranks of the world's context-parallel group.

    Args:
        world: this process's place.
        owners: by rank, who owns which keys.
        queries: the rows of this rank; the same on every rank with `everywhere`.
        held: the blocks that this rank holds so far, in the order of their tokens.
        shape: what all ranks know.
        everywhere: every rank merges every row, as in a decode; else each its own, as in training.
        merge: how the nodes become the answer.

    Returns:
        The answer of `queries`, and what ran for it.

    Raises:
        InvalidCall: `C-OWN-...` for owners that part inside of a leaf, or do not hold each key once.
    """
    runs = runs_of(owners)
    counts = [len(queries.q)] if everywhere else [len(q) for q in world.all_gather(queries.positions)]
    everyone = queries if everywhere else _everyone(world, queries)
    first = 0 if everywhere else sum(counts[: world.cp_rank])
    mine = slice(first, first + len(queries.q))
    nodes = [_node(run, everyone, held, shape) for run in runs[world.cp_rank]]
    received = [world.all_gather_lists([getattr(node, name) for node in nodes], *kind) for name, kind in NODE]
    reached = world.all_gather(np.array([block.range for block in held], np.int64).reshape(-1, 2))
    parts: dict[tka1.Run, tka1.Partials] = {}
    merged = {}
    for owner, sent in enumerate(zip(*received, strict=True)):
        for run, *node in zip(runs[owner], *sent, strict=True):
            parts[run] = tka1.Partials(*(part[mine] for part in node))
        merged[owner] = leaves(runs[owner], [(int(start), int(stop)) for start, stop in reached[owner]])
    outputs, reduction = merge(parts, shape.dtype)
    return Executed(merged, outputs, parts, reduction, shape.dtype)


def runs_of(owners: Sequence[Owner]) -> list[list[tka1.Run]]:
    """Return, owner by owner, the fewest aligned runs of leaves that hold what it owns.

    Raises:
        InvalidCall: `C-OWN-...`, as `check_owners`.
    """
    end = max((high for owner in owners for _, high in owner.ranges), default=0)
    check_owners(owners, 0, end, tka1.LEAF)
    return [tka1.fewest_runs(0, owner.leaves(tka1.LEAF)) for owner in owners]


def leaves(runs: list[tka1.Run], reached: list[Range]) -> tuple[Range, ...]:
    """Return the token ranges of the leaves of nodes, as far as their owner held keys of them."""
    cut = []
    for low, high in sorted(run.rows for run in runs):
        for start in range(low, high, tka1.LEAF):
            stops = [min(start + tka1.LEAF, stop) for begin, stop in reached if begin <= start < stop]
            cut += [(start, stop) for stop in stops]
    return tuple(cut)


def _everyone(world: World, queries: Queries) -> Queries:
    columns = (queries.q, queries.positions, queries.first, queries.end)
    return Queries(*(np.concatenate(world.all_gather(column)) for column in columns))


def _node(run: tka1.Run, queries: Queries, held: list[Held], shape: Shape) -> tka1.Partials:
    """Compute a node of the tree from the block that holds it; of keys that do not exist yet it is empty."""
    low, _ = run.rows
    block = next((block for block in held if block.range[0] <= low < block.range[1]), None)
    if block is None:
        block = Held(low, held[0].keys[:0], held[0].values[:0])
    return tka1.partials(launch(queries, block, shape), run=run)
