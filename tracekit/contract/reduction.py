"""How partial states became one answer (B5 to B8): what ran, and what the mandate allows."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum

from tracekit.contract.codes import Issue


class Merge(StrEnum):
    """How two partial states become one."""

    ONLINE_SOFTMAX_LSE = "online_softmax_lse"
    PLAIN_SUM = "plain_sum"


class MergeOrder(StrEnum):
    """By what partial states are ordered before they merge."""

    GLOBAL_BLOCK_INDEX = "global_block_index"
    ARRIVAL = "arrival"
    RANK = "rank"


class Tree(StrEnum):
    """Which pairs merge: FP32 merges are not associative, so two trees are two reductions."""

    LEFT_FOLD = "left_fold"
    ALIGNED_BINARY = "aligned_binary"


class Downcast(StrEnum):
    """Where FP32 becomes the output's dtype."""

    FINAL_WRITE = "final_write"
    PER_BLOCK = "per_block"


@dataclass(frozen=True)
class Reduction:
    """The reduction that ran.

    Args:
        merge: how two partial states become one.
        acc_dtype: the dtype that partial states have while they wait and merge, `fp32` or `bf16`.
        order: by what they are ordered.
        downcast_at: where FP32 becomes the output's dtype.
        tree: which pairs merge.
        engine: who merged; recorded, never compared.
    """

    merge: Merge = Merge.ONLINE_SOFTMAX_LSE
    acc_dtype: str = "fp32"
    order: MergeOrder = MergeOrder.GLOBAL_BLOCK_INDEX
    downcast_at: Downcast = Downcast.FINAL_WRITE
    tree: Tree = Tree.ALIGNED_BINARY
    engine: str = "in_op_reference"


SEMANTIC = ("merge", "acc_dtype", "order", "downcast_at", "tree")
"""Fields that decide bits: equal on both sides."""

MANDATE = {
    "merge": Merge.ONLINE_SOFTMAX_LSE.value,
    "acc_dtype": "fp32",
    "order": MergeOrder.GLOBAL_BLOCK_INDEX.value,
    "downcast_at": Downcast.FINAL_WRITE.value,
}
"""What a binding demands of each side. The tree is free, but the same on both."""


def check_reduction(rollout: Mapping[str, Reduction], training: Mapping[str, Reduction]) -> Iterator[Issue]:
    """Yield the issues of the reductions that the ranks of two sides ran, by rank name."""
    for side, ranks in (("rollout", rollout), ("training", training)):
        for name, reduction in ranks.items():
            stated = asdict(reduction)
            for field, mandated in MANDATE.items():
                if stated[field] != mandated:
                    yield Issue(
                        "REDUCTION_MANDATE_VIOLATION",
                        f"{side}.{name}.reduction.{field}",
                        f"the {side} side ran {field} {stated[field]}; a binding takes {mandated} only.",
                        **{side: stated[field]},
                    )
    for field in SEMANTIC:
        theirs, ours = (
            sorted({str(asdict(reduction)[field]) for reduction in side.values()})
            for side in (rollout, training)
        )
        if rollout and training and (theirs != ours or len(theirs) > 1):
            yield Issue(
                "REDUCTION_SEMANTIC_MISMATCH",
                f"reduction.{field}",
                f"{field} is not one on all ranks of both sides.",
                theirs,
                ours,
            )


SUPPORTED_REQUESTS: dict[str, frozenset[str]] = {
    "attention.reduction_merge": frozenset({"online_softmax_lse"}),
    "attention.reduction_order": frozenset({"global_block_index"}),
    "attention.reduction_acc_dtype": frozenset({"fp32"}),
    "attention.reduction_downcast_at": frozenset({"final_write"}),
    "attention.reduction_tree": frozenset({"aligned_binary"}),
}
"""Requests about the reduction that TKA-1 can serve. Others are refused and never coerced to these."""


def unsupported_reduction_reason(requested: Mapping[str, str]) -> str | None:
    """Return why a reduction that is asked for cannot be had, or None.

    Args:
        requested: knob -> value; knobs that are not about the reduction are not looked at.
    """
    for knob, value in requested.items():
        allowed = SUPPORTED_REQUESTS.get(knob)
        if allowed is None and knob.startswith("attention.reduction_"):
            return f"{knob} is no knob of the reduction; there are {', '.join(sorted(SUPPORTED_REQUESTS))}"
        if allowed is not None and value not in allowed:
            return f"{knob}={value} is not supported; the kernel does {', '.join(sorted(allowed))} only"
    return None
