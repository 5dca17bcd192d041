"""Which blocks of keys a context-parallel rank owns, cut at leaves so that its partials are nodes (S14)."""

from dataclasses import dataclass
from enum import StrEnum

from tracekit.errors import InvalidCall
from tracekit.providers.tka1 import LEAF, Run, fewest_runs

Range = tuple[int, int]


class Layout(StrEnum):
    """How a sequence is dealt out."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"


@dataclass(frozen=True)
class Ownership:
    """The blocks of every context-parallel rank.

    Args:
        blocks: by rank the token ranges that it owns, ascending; a rank may own none.

    Raises:
        InvalidCall: `S14-CUT` for a cut inside of a leaf: the two sides of it would not be nodes of the tree.
    """

    blocks: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        ends = {stop for owned in self.blocks for _, stop in owned}
        for rank, owned in enumerate(self.blocks):
            for start, stop in owned:
                if start % LEAF or (stop % LEAF and stop != max(ends)):
                    raise InvalidCall(
                        f"rank {rank} owns tokens {start} to {stop}, and owners part at multiples of {LEAF}: "
                        "the sides of another cut are no nodes of the tree. Rule: docs/tka1.md, S14.",
                        rule="S14-CUT",
                    )

    def runs(self, rank: int) -> list[Run]:
        """Return the fewest aligned runs of leaves that hold what a rank owns."""
        leaves = [
            leaf for start, stop in self.blocks[rank] for leaf in range(start // LEAF, -(-stop // LEAF))
        ]
        return fewest_runs(0, leaves)


def deal(length: int, ranks: int, layout: Layout) -> Ownership:
    """Deal a sequence out to ranks, leaf by leaf as evenly as leaves allow.

    Args:
        length: tokens.
        ranks: context-parallel ranks; the last may own fewer tokens, or none of a short sequence.
        layout: contiguous, or zigzag, where rank r owns parts r and 2 * ranks - 1 - r of 2 * ranks.
    """
    parts = ranks if layout is Layout.CONTIGUOUS else 2 * ranks
    whole_leaves = (length + LEAF - 1) // LEAF
    size = (whole_leaves + parts - 1) // parts * LEAF
    cut = [(min(n * size, length), min((n + 1) * size, length)) for n in range(parts)]
    owned = [[cut[r]] if parts == ranks else [cut[r], cut[parts - 1 - r]] for r in range(ranks)]
    return Ownership(tuple(_joined(mine) for mine in owned))


def _joined(blocks: list[Range]) -> tuple[Range, ...]:
    """Neighbouring blocks of one rank are one block, so that a node never reads two."""
    found: list[Range] = []
    for start, stop in blocks:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            start, _ = found.pop()
        found.append((start, stop))
    return tuple(found)
