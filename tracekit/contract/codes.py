"""The tiers and codes of a binding, in the names of RL-Kernel's `attention_binding`, and its issues."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Tier(StrEnum):
    """Which rule a field is under."""

    IDENTICAL = "identical"
    """Equal on both sides, or the pair is not comparable: no number computed from it means anything."""
    SEMANTIC = "semantic"
    """Equal on both sides and as the mandate says, or the binding fails closed."""
    RECORDED = "recorded"
    """Free to differ; kept, because it is what an experiment varies."""


CODES: dict[str, tuple[Tier, str]] = {
    "IDENTITY_MISSING": (Tier.IDENTICAL, "each side states every field of the identity"),
    "IDENTITY_MISMATCH": (Tier.IDENTICAL, "the fields of the identity are equal on both sides"),
    "TOPOLOGY_MISMATCH": (Tier.IDENTICAL, "head and sequence ownership are equal on both sides"),
    "TOPOLOGY_INCOMPLETE": (Tier.IDENTICAL, "the shards of all ranks hold each head and each token once"),
    "ROLE_COLLISION": (Tier.IDENTICAL, "one side trained and the other one served"),
    "RUNTIME_INCOMPLETE": (Tier.SEMANTIC, "every rank of a side left its readback"),
    "RUNTIME_UNOBSERVABLE": (Tier.SEMANTIC, "what is bound was read back after execution, not configured"),
    "RUNTIME_UNSUPPORTED": (Tier.SEMANTIC, "a runtime can do what it is asked to do"),
    "RUNTIME_FALLBACK": (Tier.SEMANTIC, "a runtime does what it is asked to do, and nothing else instead"),
    "RUNTIME_ERROR": (Tier.SEMANTIC, "no rank failed"),
    "CP_FALLBACK": (Tier.SEMANTIC, "the context-parallel size that ran is the one that was asked for"),
    "REDUCTION_SEMANTIC_MISMATCH": (Tier.SEMANTIC, "both sides reduce in the same way and the same dtype"),
    "REDUCTION_MANDATE_VIOLATION": (
        Tier.SEMANTIC,
        "partials merge by their LSE, in FP32, by global block, with one downcast at the final write",
    ),
    "LSE_NOT_EXPORTED": (Tier.SEMANTIC, "the LSE of attention is exported, executed and in nats"),
    "DETERMINISM_INCOMPATIBLE": (Tier.SEMANTIC, "the scope of the attention was verified on each rank"),
    "SPLIT_KV_REQUEST": (Tier.SEMANTIC, "a strict binding asks for a split that the shape cannot change"),
    "SPLIT_KV_RUNTIME_MISSING": (Tier.SEMANTIC, "each side states the split plans that it executed"),
    "SPLIT_KV_MISMATCH": (
        Tier.SEMANTIC,
        "the executed plans cover every coordinate and token once, and are equal on all ranks and sides",
    ),
    "SPLIT_KV_FALLBACK": (Tier.SEMANTIC, "the split that ran is the one that was asked for"),
    "ATTENTION_PREPROCESS_MISSING": (Tier.SEMANTIC, "QK-norm and RoPE are stated where they are in scope"),
    "ATTENTION_PREPROCESS_MISMATCH": (Tier.SEMANTIC, "both sides ran the same QK-norm and RoPE"),
    "ATTENTION_PREPROCESS_FALLBACK": (Tier.SEMANTIC, "QK-norm and RoPE did not fall back"),
    "ATTENTION_PROJECTION_MISSING": (Tier.SEMANTIC, "the projections are stated where they are in scope"),
    "ATTENTION_PROJECTION_MISMATCH": (Tier.SEMANTIC, "both sides ran the same projections"),
    "ATTENTION_CORE_MISSING": (Tier.SEMANTIC, "each side states the kernel that ran"),
    "ATTENTION_CORE_MISMATCH": (Tier.SEMANTIC, "both sides ran the same kernel"),
    "ATTENTION_CORE_SCHEDULE": (Tier.SEMANTIC, "both sides state the same schedule of reduction"),
    "ATTENTION_BACKEND_MISSING": (Tier.SEMANTIC, "each side states the backends that ran"),
    "ATTENTION_NOT_PRODUCTION_READY": (Tier.SEMANTIC, "what ran is the path that serves, no reference"),
    "EVIDENCE_MISMATCH": (Tier.SEMANTIC, "what a rank says of itself is what its trace holds"),
    "BITS_NOT_COMPARED": (Tier.SEMANTIC, "both sides left rows that can be compared"),
    "BITS_DIFFER": (Tier.SEMANTIC, "the rows that both sides computed have the same bits"),
}
"""Each code, its tier and its rule. Codes are part of the JSON: a new name needs a new schema version."""


@dataclass(frozen=True)
class Issue:
    """One reason why a pair is not comparable, or why its binding failed closed.

    Args:
        code: one of `CODES`.
        field: what it is about, `rollout.rank[tp 0, cp 1].split_kv`.
        message: one sentence.
        rollout: what the rollout side says; None where it says nothing.
        training: what the training side says.
    """

    code: str
    field: str
    message: str
    rollout: Any = None
    training: Any = None

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"{self.code} is no code of a binding")

    @property
    def tier(self) -> Tier:
        """The tier of the code."""
        return CODES[self.code][0]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {**asdict(self), "tier": self.tier.value}
