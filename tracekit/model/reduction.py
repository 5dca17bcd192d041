"""How partial attention states become one: everything that decides the bits of a merge, as one value.

Two runs may be compared in bits only where their reductions are equal; a spec is what each of them *did*, so
it can also say what nobody should do (`unsupported`). It is never coerced into something else.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from tracekit.errors import InvalidCall
from tracekit.model.bits import DType
from tracekit.model.conventions import LseBase


class Tree(StrEnum):
    """In which association the partials of ascending blocks merge.

    `left_fold`: ((b0 + b1) + b2) + ..., so a bit depends on which blocks there are. `aligned_binary`: node
    (level, i) is the merge of (level-1, 2i) and (level-1, 2i+1) over the block index, so any owner may send
    any of its nodes (docs/tka1.md, S8 and S14).
    """

    LEFT_FOLD = "left_fold"
    ALIGNED_BINARY = "aligned_binary"


class PartialState(StrEnum):
    """What a partial holds: TKA-1's (acc, l, M), or the normalised O with its LSE."""

    ACC_L_M = "acc_l_m"
    OUT_LSE = "out_lse"


class MergeOrder(StrEnum):
    """What orders the partials of a merge."""

    GLOBAL_BLOCK_INDEX = "global_block_index"
    ARRIVAL = "arrival"
    RANK = "rank"


class Downcast(StrEnum):
    """Where the result leaves the dtype of accumulation."""

    FINAL_WRITE = "final_write"
    PER_BLOCK = "per_block"


class SinkPlace(StrEnum):
    """Where the sink joins the denominator; `every_partial` counts it too often."""

    AFTER_MERGE = "after_merge"
    FIRST_PARTIAL = "first_partial"
    EVERY_PARTIAL = "every_partial"


@dataclass(frozen=True)
class ReductionSpec:
    """One reduction of partial attention states.

    Args:
        tree: the association.
        leaf: KV rows of a block; block i holds the row ids `i * leaf .. (i + 1) * leaf - 1` of its family.
        partial: what is exchanged.
        lse_base: base of the LSE of an `out_lse` partial; natural where the partial has none.
        accumulate: dtype of the merge.
        order: of the blocks.
        downcast: where the dtype of accumulation ends.
        sink: where the sink joins.

    Raises:
        InvalidCall: `M-REDUCTION` for a leaf below 1.
    """

    tree: Tree
    leaf: int
    partial: PartialState = PartialState.OUT_LSE
    lse_base: LseBase = LseBase.NATURAL
    accumulate: DType = DType.FLOAT32
    order: MergeOrder = MergeOrder.GLOBAL_BLOCK_INDEX
    downcast: Downcast = Downcast.FINAL_WRITE
    sink: SinkPlace = SinkPlace.AFTER_MERGE

    def __post_init__(self) -> None:
        if self.leaf < 1:
            raise InvalidCall(f"a block holds at least one row, not {self.leaf}.", rule="M-REDUCTION")

    def violations(self) -> dict[str, str]:
        """Return the fields that are outside the mandate, by name, each with one clause that says how.

        The mandate: FP32 accumulation, blocks in the order of their global index, one downcast at the final
        write, the sink once.
        """
        checks = {
            "order": (
                self.order is MergeOrder.GLOBAL_BLOCK_INDEX,
                f"partials merge in order of {self.order}",
            ),
            "accumulate": (self.accumulate is DType.FLOAT32, f"partials accumulate in {self.accumulate}"),
            "downcast": (self.downcast is Downcast.FINAL_WRITE, f"the downcast is {self.downcast}"),
            "sink": (self.sink is not SinkPlace.EVERY_PARTIAL, "every partial counts the sink"),
        }
        return {field: what for field, (fine, what) in checks.items() if not fine}

    def unsupported(self) -> str | None:
        """Return why nothing strict may be built on this reduction, in one clause, or None."""
        return next(iter(self.violations().values()), None)

    def differences(self, other: "ReductionSpec") -> dict[str, tuple[Any, Any]]:
        """Return the fields in which two reductions differ, by name; any of them is a reduction mismatch."""
        mine, theirs = self.to_dict(), other.to_dict()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; `parse_reduction` reads them."""
        return {name: value if isinstance(value, int) else str(value) for name, value in asdict(self).items()}


TKA1_REDUCTION = ReductionSpec(Tree.ALIGNED_BINARY, 128, PartialState.ACC_L_M)
"""The reduction of TKA-1 (docs/tka1.md, S6 to S10)."""

_TYPES: Mapping[str, type[StrEnum]] = {
    "tree": Tree,
    "partial": PartialState,
    "lse_base": LseBase,
    "accumulate": DType,
    "order": MergeOrder,
    "downcast": Downcast,
    "sink": SinkPlace,
}


def parse_reduction(document: Mapping[str, Any]) -> ReductionSpec:
    """Parse `ReductionSpec.to_dict()`.

    Raises:
        InvalidCall: `M-REDUCTION` for a field that is missing, unknown, or of a value that nobody defined;
            nothing is filled in.
    """
    names = {field.name for field in fields(ReductionSpec)}
    if set(document) != names:
        odd = sorted(names ^ set(document))
        raise InvalidCall(f"a reduction has the fields {sorted(names)}; look at {odd}.", rule="M-REDUCTION")
    leaf = document["leaf"]
    if type(leaf) is not int:
        raise InvalidCall(f"leaf is a number of rows, not {leaf!r}.", rule="M-REDUCTION")
    values: dict[str, Any] = {"leaf": leaf}
    for name, kind in _TYPES.items():
        try:
            values[name] = kind(document[name])
        except ValueError as error:
            raise InvalidCall(
                f"{name} is one of {', '.join(kind)}, not {document[name]!r}.", rule="M-REDUCTION"
            ) from error
    return ReductionSpec(**values)
