"""One launch of TKA-1 worked on by several ranks: each sees its own heads, tokens and KV, and sends partials.

Nothing here is a process; it is what the processes of a job compute and exchange. Rows of KV that a rank does
not hold are NaN to it, so that a partial which reads them cannot pass.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from tracekit.canonical.heads import HeadShards
from tracekit.canonical.owners import Owner
from tracekit.model import Array, DType
from tracekit.providers import tka1
from tracekit.providers.split import Split

Arrived = Sequence[tuple[tka1.Run, tka1.Partials]]
"""Partials in the order in which they arrive."""

Merge = Callable[[Arrived, Array | None, DType], tka1.Outputs]


def merge_by_key(arrived: Arrived, sink: Array | None, dtype: DType) -> tka1.Outputs:
    """Merge in the tree, whatever the order of arrival (docs/tka1.md, S14)."""
    return tka1.merge(dict(arrived), sink, dtype)


def attention_of_ranks(
    inputs: tka1.Inputs,
    positions: Array,
    split: Split,
    *,
    merge: Merge = merge_by_key,
    form: tka1.Form = "auto",
    threads: int | None = None,
) -> tka1.Outputs:
    """Compute a launch as a job of tensor × context ranks.

    Args:
        inputs: the launch.
        positions: int64 `[T]`; a context rank works on the rows of its own tokens.
        split: the job.
        merge: how the partials of a row become its answer.
        form: of TKA-1.
        threads: of each rank.

    Raises:
        InvalidCall: `C-TP-UNEVEN` for heads that do not divide, `C-OWN-...` for a cut inside a leaf.
    """
    shards = HeadShards(inputs.q.shape[1], inputs.kv_heads, split.tensor)
    parts = []
    for rank in range(split.tensor):
        mine = _heads(inputs, shards, rank)
        parts.append(_context_ranks(mine, positions, split, merge, form, threads))
    return tka1.Outputs(*(shards.unshard_query([vars(p)[name] for p in parts]) for name in vars(parts[0])))


def _heads(inputs: tka1.Inputs, shards: HeadShards, rank: int) -> tka1.Inputs:
    """The launch of one tensor rank."""
    kv, query = shards.key_heads(rank), shards.query_heads(rank)
    families = []
    for family in inputs.families:
        keys = tuple(np.ascontiguousarray(k[:, kv]) for k in family.keys)
        values = tuple(
            key if v is k else np.ascontiguousarray(v[:, kv])
            for k, v, key in zip(family.keys, family.values, keys, strict=True)
        )
        families.append(replace(family, keys=keys, values=values))
    sink = None if inputs.sink is None else inputs.sink[query]
    return replace(inputs, q=inputs.q[:, query], families=tuple(families), sink=sink)


def _context_ranks(
    inputs: tka1.Inputs,
    positions: Array,
    split: Split,
    merge: Merge,
    form: tka1.Form,
    threads: int | None,
) -> tka1.Outputs:
    """The launch of one tensor rank, by its context ranks: rows of a request that one of them works on."""
    rows, heads, _ = inputs.q.shape
    whole = tka1.Outputs(
        np.zeros((rows, heads, inputs.value_dim), inputs.dtype.container),
        np.zeros((rows, heads), np.uint32),
        np.zeros((rows, heads), np.uint32),
    )
    for number, mine in enumerate(_tokens_of_ranks(inputs, positions, split)):
        some = inputs.take(mine)
        arrived = [
            (run, tka1.partials(own, run=run, form=form, threads=threads)) for own, run in _sent(some, split)
        ]
        if split.arrival:
            random = np.random.default_rng([split.arrival, number])
            arrived = [arrived[i] for i in random.permutation(len(arrived))]
        answer = merge(arrived, inputs.sink, inputs.dtype)
        for name, array in vars(whole).items():
            array[mine] = vars(answer)[name]
    return whole


def _tokens_of_ranks(inputs: tka1.Inputs, positions: Array, split: Split) -> Iterator[Array]:
    """The rows of each request that one context rank works on, where there are some."""
    for request in np.unique(inputs.request):
        mine = np.flatnonzero(inputs.request == request)
        owners = split.owners(0, int(positions[mine].max()) + 1, tka1.LEAF)
        for owner in owners:
            held = np.isin(positions[mine] // tka1.LEAF, owner.leaves(tka1.LEAF))
            if held.any():
                yield mine[held]


def _sent(inputs: tka1.Inputs, split: Split) -> Iterator[tuple[tka1.Inputs, tka1.Run]]:
    """What every owner sends for rows of one request: its view of the launch, and a run of its leaves."""
    request = int(inputs.request[0])
    extents = [(f.first[request], f.first[request] + len(f.keys[request])) for f in inputs.families]
    shares = [split.owners(first, end, tka1.LEAF) for first, end in extents]
    none = True
    for rank in range(split.context):
        owned = [share[rank] for share in shares]
        own = _own(inputs, owned)
        for family, owner in enumerate(owned):
            for piece in split.pieces(owner, tka1.LEAF):
                for run in tka1.fewest_runs(family, piece):
                    none = False
                    yield own, run
    if none:  # nobody holds a row: the launch still has an answer
        yield inputs, tka1.Run(0, 0, 0)


def _own(inputs: tka1.Inputs, owned: Sequence[Owner]) -> tka1.Inputs:
    """The launch as one rank sees it: rows that it does not hold are NaN."""
    request = int(inputs.request[0])
    nan = inputs.q.dtype.type(0x7FC00000 if inputs.q.itemsize == 4 else 0x7FFF)
    families = []
    for family, owner in zip(inputs.families, owned, strict=True):
        ids = family.first[request] + np.arange(len(family.keys[request]))
        foreign = ~np.any([(ids >= low) & (ids < high) for low, high in owner.ranges] or [ids < 0], axis=0)
        k, v = family.keys[request], family.values[request]
        key = np.where(foreign[:, None, None], nan, k)
        value = key if v is k else np.where(foreign[:, None, None], nan, v)
        keys, values = list(family.keys), list(family.values)
        keys[request], values[request] = key, value
        families.append(replace(family, keys=tuple(keys), values=tuple(values)))
    return replace(inputs, families=tuple(families))
