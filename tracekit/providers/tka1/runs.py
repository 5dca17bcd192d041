"""S14: the partials of aligned runs of leaves, so that several owners of KV can share one attention.

An owner computes the nodes of its own leaves, from its own rows alone; whoever merges them needs no KV.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tracekit.errors import InvalidCall
from tracekit.model.bits import DType
from tracekit.providers.tka1 import numpy_form
from tracekit.providers.tka1.inputs import LEAF, U32, FamilyInput, Inputs, Lists, Outputs, Partials, Ranges

FAMILY_SHIFT = 26
"""S9: the key of a node in the tree is `family << 26 | leaf`."""


@dataclass(frozen=True, order=True)
class Run:
    """2^level leaves of one family, from leaf `first`, a multiple of 2^level.

    Raises:
        InvalidCall: `S14-ALIGNED` for a run that is no node of the tree.
    """

    family: int
    first: int
    level: int

    def __post_init__(self) -> None:
        inside = self.family in (0, 1) and 0 <= self.level <= FAMILY_SHIFT
        inside = inside and 0 <= self.first < self.first + (1 << self.level) <= 1 << FAMILY_SHIFT
        if not inside or self.first % (1 << self.level):
            raise InvalidCall(
                f"{self} is no node of the tree: a run holds 2^level leaves and starts at a multiple of it, "
                "in family 0 or 1. Rule: docs/tka1.md, S14.",
                rule="S14-ALIGNED",
            )

    @property
    def key(self) -> int:
        """Place in the tree, the families included."""
        return int(self.family) << FAMILY_SHIFT | int(self.first)

    @property
    def rows(self) -> tuple[int, int]:
        """The row ids `[low, high)` of the run."""
        return self.first * LEAF, (self.first + (1 << self.level)) * LEAF


def fewest_runs(family: int, leaves: Iterable[int]) -> list[Run]:
    """Return the fewest aligned runs that hold exactly these leaves."""
    nodes, level, runs = set(leaves), 0, []
    while nodes:
        whole = {i for i in nodes if i ^ 1 in nodes}
        runs += [Run(family, i << level, level) for i in nodes - whole]
        nodes, level = {i >> 1 for i in whole}, level + 1
    return sorted(runs)


def within(inputs: Inputs, run: Run) -> Inputs:
    """Return the launch without the keys outside of a run: the partials of its rows are those of the run."""
    families = tuple(
        replace(f, selection=_cut(f, run) if number == run.family else _nothing(f))
        for number, f in enumerate(inputs.families)
    )
    return replace(inputs, families=families)


def merge(parts: Mapping[Run, Partials], sink: U32 | None = None, dtype: DType = DType.BFLOAT16) -> Outputs:
    """Merge the partials of runs into O and both LSE (S8 to S12), to the bits of the unsplit launch.

    Args:
        parts: by run, in any order; together they hold every key of every row. A run without keys may be
            left out.
        sink: as of the launch.
        dtype: as of the launch.

    Raises:
        InvalidCall: `S14-OVERLAP` for a leaf in two runs, `S14-SHAPE` for partials of different launches.
        Unsupported: `S1-FLUSH`, as the numpy form.
    """
    return numpy_form.merge(_in_order(parts), sink, dtype)


def merge_rows(parts: Mapping[Run, Partials]) -> Partials:
    """Merge the partials of runs as `merge`, and stop before the sink and the division (S10).

    Args:
        parts: as `merge`; errors as there.
    """
    return numpy_form.merge_rows(_in_order(parts))


def _in_order(parts: Mapping[Run, Partials]) -> list[tuple[int, Partials]]:
    runs = sorted(parts, key=lambda run: run.key)
    for a, b in itertools.pairwise(runs):
        if a.key + (1 << a.level) > b.key:
            raise InvalidCall(
                f"{a} and {b} share leaves; a key would count twice. Rule: docs/tka1.md, S14.",
                rule="S14-OVERLAP",
            )
    shapes = {parts[run].acc.shape for run in runs}
    if len(shapes) != 1:
        raise InvalidCall(
            f"partials of the shapes {sorted(shapes)}; a merge needs those of one launch. "
            "Rule: docs/tka1.md, S14.",
            rule="S14-SHAPE",
        )
    return [(run.key, parts[run]) for run in runs]


def _cut(family: FamilyInput, run: Run) -> Ranges | Lists:
    low, high = run.rows
    selection = family.selection
    if isinstance(selection, Ranges):
        return Ranges(np.maximum(selection.lo, low), np.minimum(selection.hi, high))
    inside = (selection.ids >= low) & (selection.ids < high)
    before = np.concatenate([[0], np.cumsum(inside)])
    return Lists(selection.ids[inside], before[selection.offsets].astype(np.int64))


def _nothing(family: FamilyInput) -> Ranges | Lists:
    selection = family.selection
    if isinstance(selection, Ranges):
        return Ranges(np.zeros_like(selection.lo), np.zeros_like(selection.hi))
    return Lists(selection.ids[:0], np.zeros_like(selection.offsets))
