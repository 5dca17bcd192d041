"""Which heads and which tokens a rank owned (B2 to B4), checked over all ranks of a side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tracekit.contract.codes import Issue
from tracekit.contract.refuse import refuse

Range = tuple[int, int]
"""Tokens `start .. end - 1`."""


MAX_RANKS = 1 << 20
"""More than any job has. A size that a file states is looked at before anything is counted up to it."""


def check_world(tp_size: int, cp_size: int) -> None:
    """Refuse a world that no job has.

    Raises:
        BindingInvalid: `B-TOPOLOGY`.
    """
    if min(tp_size, cp_size) < 1 or tp_size * cp_size > MAX_RANKS:
        refuse("B-TOPOLOGY", f"a world of tp {tp_size}, cp {cp_size} has 1 to {MAX_RANKS:,} ranks.")


class TopologyPolicy(StrEnum):
    """Whether the two sides must be cut alike."""

    MUST_MATCH = "must_match"
    """The same ranks own the same heads and tokens: the rule of RL-Kernel's strict binding."""
    MAY_DIFFER = "may_differ"
    """Each side covers its heads and tokens once, in whatever cut: what tree-invariant kernels allow."""


@dataclass(frozen=True)
class Sharding:
    """What one rank owned.

    Args:
        tp_rank: tensor-parallel rank.
        tp_world_size: tensor-parallel ranks.
        cp_rank: context-parallel rank.
        cp_world_size: context-parallel ranks.
        global_q_heads: query heads of the model.
        global_kv_heads: key and value heads of the model.
        local_q_head_start: first query head of the rank.
        local_q_heads: query heads of the rank.
        local_kv_head_start: first key and value head of the rank.
        local_kv_heads: key and value heads of the rank.
        global_sequence_length: tokens of the sequence.
        blocks: token ranges of the rank, ascending; contiguous CP has one, zigzag two, an empty rank none.

    Raises:
        BindingInvalid: `B-TOPOLOGY` for a rank outside its world, heads that are not an even contiguous cut
            of grouped-query attention, and blocks that overlap, are not sorted or leave the sequence.
    """

    tp_rank: int
    tp_world_size: int
    cp_rank: int
    cp_world_size: int
    global_q_heads: int
    global_kv_heads: int
    local_q_head_start: int
    local_q_heads: int
    local_kv_head_start: int
    local_kv_heads: int
    global_sequence_length: int
    blocks: tuple[Range, ...]

    def __post_init__(self) -> None:
        check_world(*self.world)
        for kind, rank, world in (
            ("tp", self.tp_rank, self.tp_world_size),
            ("cp", self.cp_rank, self.cp_world_size),
        ):
            if not 0 <= rank < world:
                refuse("B-TOPOLOGY", f"{kind} rank {rank} is none of {world} ranks.")
        self._check_heads()
        end = 0
        for start, stop in self.blocks:
            if not end <= start < stop <= self.global_sequence_length:
                refuse(
                    "B-TOPOLOGY",
                    f"blocks {list(self.blocks)} are not ascending, disjoint, non-empty ranges of "
                    f"{self.global_sequence_length} tokens.",
                )
            end = stop

    def _check_heads(self) -> None:
        """Grouped-query heads are cut evenly: rank r of R owns the r-th part of both kinds of heads."""
        cuts = (
            ("query", self.global_q_heads, self.local_q_head_start, self.local_q_heads),
            ("key/value", self.global_kv_heads, self.local_kv_head_start, self.local_kv_heads),
        )
        for kind, whole, start, count in cuts:
            if whole < 1 or whole % self.tp_world_size or count * self.tp_world_size != whole:
                refuse("B-TOPOLOGY", f"{whole} {kind} heads are not cut evenly: {count} on a rank.")
            if start != self.tp_rank * count:
                refuse(
                    "B-TOPOLOGY",
                    f"tp rank {self.tp_rank} owns {count} {kind} heads from {self.tp_rank * count}, "
                    f"not from {start}.",
                )
        if self.global_q_heads % self.global_kv_heads:
            refuse(
                "B-TOPOLOGY",
                f"{self.global_q_heads} query heads do not share {self.global_kv_heads} key/value heads.",
            )

    @property
    def rank(self) -> tuple[int, int]:
        """`(tp_rank, cp_rank)`."""
        return self.tp_rank, self.cp_rank

    @property
    def world(self) -> tuple[int, int]:
        """`(tp_world_size, cp_world_size)`."""
        return self.tp_world_size, self.cp_world_size


def rank_name(tp_rank: int, cp_rank: int) -> str:
    """Return how messages name a rank."""
    return f"rank[tp {tp_rank}, cp {cp_rank}]"


def check_cover(side: str, shards: Sequence[Sharding]) -> Iterator[Issue]:
    """Yield an issue where the ranks of a side do not agree on the whole, or their tokens do not tile it.

    Ranks that left no readback are told by `RUNTIME_INCOMPLETE`; here only those that did are looked at, and
    their tokens are judged when none is missing.
    """
    wholes = {(s.world, s.global_q_heads, s.global_kv_heads, s.global_sequence_length) for s in shards}
    if len(wholes) > 1:
        yield Issue(
            "TOPOLOGY_INCOMPLETE", f"{side}.sharding", f"the ranks of the {side} side disagree on the whole."
        )
        return
    by_rank = {shard.rank: shard for shard in shards}
    if len(by_rank) < len(shards):
        yield Issue("TOPOLOGY_INCOMPLETE", f"{side}.sharding", f"a rank of the {side} side came twice.")
        return
    for tp_rank in sorted({tp for tp, _ in by_rank}):
        row = [shard for (tp, _), shard in sorted(by_rank.items()) if tp == tp_rank]
        if len(row) == row[0].cp_world_size and not tiles(
            [block for shard in row for block in shard.blocks], row[0].global_sequence_length
        ):
            yield Issue(
                "TOPOLOGY_INCOMPLETE",
                f"{side}.sharding.blocks",
                f"the blocks of tp rank {tp_rank} do not hold each token of the {side} side once.",
            )


def tiles(ranges: Sequence[Range], total: int) -> bool:
    """Whether ranges, in any order, hold each of `total` tokens once."""
    end = 0
    for start, stop in sorted(ranges):
        if start != end:
            return False
        end = stop
    return end == total


def check_topology(
    rollout: Sequence[Sharding], training: Sequence[Sharding], policy: TopologyPolicy
) -> Iterator[Issue]:
    """Yield the issues of ownership: of each side by itself, and of the pair as the policy says."""
    yield from check_cover("rollout", rollout)
    yield from check_cover("training", training)
    if not rollout or not training:
        return
    wholes = ("global_q_heads", "global_kv_heads", "global_sequence_length")
    if policy is TopologyPolicy.MAY_DIFFER:
        for name in wholes:
            theirs, ours = getattr(rollout[0], name), getattr(training[0], name)
            if theirs != ours:
                yield _mismatch(name, theirs, ours)
        return
    theirs_by, ours_by = ({shard.rank: shard for shard in side} for side in (rollout, training))
    if rollout[0].world != training[0].world:
        yield _mismatch("world_size", rollout[0].world, training[0].world)
        return
    for rank in sorted(theirs_by.keys() & ours_by.keys()):
        theirs_shard, ours_shard = theirs_by[rank], ours_by[rank]
        for name in Sharding.__dataclass_fields__:
            theirs, ours = getattr(theirs_shard, name), getattr(ours_shard, name)
            if theirs != ours:
                yield _mismatch(f"{rank_name(*rank)}.{name}", theirs, ours)


def _mismatch(field: str, theirs: object, ours: object) -> Issue:
    return Issue(
        "TOPOLOGY_MISMATCH",
        f"sharding.{field}",
        f"{field} differs: the two sides did not compute the same local attention.",
        theirs,
        ours,
    )
