"""How the ranks of a parallel job share a launch: what `splits`, `cp` and `tp` vary."""

from dataclasses import dataclass
from enum import StrEnum

from tracekit.canonical.owners import Owner, contiguous_owners, split_owners, zigzag_owners


class Sequence(StrEnum):
    """How context-parallel ranks share a sequence."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"


@dataclass(frozen=True)
class Split:
    """One job: tensor × context ranks, each of which works on its own heads, tokens and rows of KV.

    Args:
        tensor: ranks that share the heads.
        context: ranks that share each sequence, its tokens and its KV.
        sequence: how they do.
        rows: most rows of KV of one partial, a multiple of a leaf; 0 is all that a rank holds.
        arrival: seed of the order in which partials arrive; 0 is the order of ranks.
    """

    tensor: int = 1
    context: int = 1
    sequence: Sequence = Sequence.CONTIGUOUS
    rows: int = 0
    arrival: int = 0

    def __str__(self) -> str:
        ranks = [f"{self.tensor} tensor ranks"] if self.tensor > 1 else []
        ranks += [f"{self.context} {self.sequence} context ranks"] if self.context > 1 else []
        ranks += [f"splits of {self.rows} rows"] if self.rows else []
        return ", ".join(ranks) + (", another arrival" if self.arrival else "")

    def owners(self, first: int, end: int, leaf: int) -> list[Owner]:
        """Return who holds which of the rows `[first, end)`, one owner a context rank.

        Raises:
            InvalidCall: `C-OWN-SIZE`.
        """
        share = zigzag_owners if self.sequence is Sequence.ZIGZAG else contiguous_owners
        return share(first, end, self.context, leaf)

    def pieces(self, owner: Owner, leaf: int) -> list[list[int]]:
        """Return the leaves of each partial that an owner sends.

        Raises:
            InvalidCall: `C-OWN-ALIGNED` when the size of a split is no multiple of a leaf.
        """
        leaves = owner.leaves(leaf)
        if not self.rows or not leaves:
            return [leaves] if leaves else []
        splits = split_owners(0, (leaves[-1] + 1) * leaf, self.rows, leaf)
        mine = [[i for i in leaves if i in set(split.leaves(leaf))] for split in splits]
        return [part for part in mine if part]
