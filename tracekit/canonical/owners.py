"""Who holds which KV rows of a sequence, where every cut lies between two leaves of a reduction.

An owner sends partials of its rows. They merge to the bits of the unsplit launch only where no leaf has two
owners (docs/tka1.md, S14), so a cut inside a leaf is refused here, by name, before anything runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.canonical.refuse import refuse


@dataclass(frozen=True)
class Owner:
    """The KV rows of one rank: ascending ranges `[low, high)` of row ids; none where the rank is empty."""

    ranges: tuple[tuple[int, int], ...] = ()

    def leaves(self, leaf: int) -> list[int]:
        """Return the leaves that it holds, ascending."""
        return [i for low, high in self.ranges for i in range(low // leaf, -(-high // leaf))]

    @property
    def rows(self) -> int:
        """How many rows it holds."""
        return sum(high - low for low, high in self.ranges)


def contiguous_owners(first: int, end: int, ranks: int, leaf: int) -> list[Owner]:
    """Return one owner a rank: the leaves of the rows `[first, end)` in `ranks` runs, as even as they go.

    With fewer leaves than ranks some owners are empty.

    Args:
        first: the first row id that is held.
        end: one past the last.
        ranks: owners, at least one.
        leaf: rows of a leaf of the reduction.

    Raises:
        InvalidCall: `C-OWN-SIZE` for sizes below one.
    """
    return [_owner([part], first, end, leaf) for part in _parts(first, end, ranks, leaf)]


def zigzag_owners(first: int, end: int, ranks: int, leaf: int) -> list[Owner]:
    """Return one owner a rank: of `2 * ranks` runs of leaves rank r holds r and `2 * ranks - 1 - r`.

    Arguments and errors as `contiguous_owners`.
    """
    parts = _parts(first, end, 2 * ranks, leaf)
    return [_owner([parts[r], parts[-1 - r]], first, end, leaf) for r in range(ranks)]


def split_owners(first: int, end: int, rows: int, leaf: int) -> list[Owner]:
    """Return one owner each `rows` rows, counted from row id 0: split-KV of a fixed size.

    Raises:
        InvalidCall: `C-OWN-ALIGNED` when the size is no multiple of a leaf, `C-OWN-SIZE` as above.
    """
    _sizes(first, end, rows, leaf)
    if rows % leaf:
        refuse(
            "C-OWN-ALIGNED",
            f"splits of {rows} rows cut leaves of {leaf}; take a multiple of {leaf}.",
            rows=rows,
            leaf=leaf,
        )
    starts = range(first // rows * rows, end, rows) if first < end else ()
    return [Owner(((max(start, first), min(start + rows, end)),)) for start in starts]


def check_owners(owners: Sequence[Owner], first: int, end: int, leaf: int) -> None:
    """Refuse owners that do not hold every row of `[first, end)` once, with cuts between leaves.

    Raises:
        InvalidCall: `C-OWN-OUTSIDE` a range outside the rows or without rows, `C-OWN-ALIGNED` a cut inside a
            leaf, `C-OWN-DUPLICATE` a row with two owners, `C-OWN-GAP` a row without one.
    """
    held = sorted((low, high, rank) for rank, one in enumerate(owners) for low, high in one.ranges)
    at = first
    for low, high, rank in held:
        if not first <= low < high <= end:
            refuse(
                "C-OWN-OUTSIDE",
                f"rank {rank} holds [{low}, {high}) of the rows [{first}, {end}).",
                rank=rank,
                range=[low, high],
            )
        cut = next((x for x in (low, high) if x % leaf and x not in (first, end)), None)
        if cut is not None:
            refuse(
                "C-OWN-ALIGNED",
                f"rank {rank} holds [{low}, {high}): row {cut} is inside a leaf; cut at multiples of {leaf}.",
                rank=rank,
                cut=cut,
                leaf=leaf,
            )
        if low < at:
            refuse("C-OWN-DUPLICATE", f"row {low} has two owners, one is rank {rank}.", rank=rank, row=low)
        if low > at:
            refuse("C-OWN-GAP", f"rows [{at}, {low}) have no owner.", row=at)
        at = high
    if at < end:
        refuse("C-OWN-GAP", f"rows [{at}, {end}) have no owner.", row=at)


def _parts(first: int, end: int, parts: int, leaf: int) -> list[range]:
    """The leaves of some rows in runs of neighbours, as even as they go."""
    _sizes(first, end, parts, leaf)
    low = first // leaf
    count = max(-(-end // leaf) - low, 0) if end > first else 0
    return [range(low + count * i // parts, low + count * (i + 1) // parts) for i in range(parts)]


def _sizes(first: int, end: int, parts: int, leaf: int) -> None:
    if min(parts, leaf) < 1 or not 0 <= first <= end:
        refuse("C-OWN-SIZE", f"rows [{first}, {end}) for {parts} owners, leaves of {leaf}.")


def _owner(parts: list[range], first: int, end: int, leaf: int) -> Owner:
    ranges: list[tuple[int, int]] = []
    for part in parts:
        if not part:
            continue
        low, high = max(part.start * leaf, first), min(part.stop * leaf, end)
        if ranges and ranges[-1][1] == low:
            ranges[-1] = (ranges[-1][0], high)
        else:
            ranges.append((low, high))
    return Owner(tuple(ranges))
