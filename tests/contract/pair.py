"""A sound pair of sides, Qwen3-8B-shaped over TP = 2 × CP = 2, to be broken one thing at a time."""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from tracekit.contract import (
    AttentionRuntimeReadback,
    Binding,
    Coordinate,
    Core,
    PlanEntry,
    Role,
    Sharding,
    SplitExecution,
    SplitKVRuntimePlanSet,
    SplitMode,
    SplitRequest,
    TopologyPolicy,
    bind_attention_runtime_readbacks,
)
from tracekit.contract.identity import FIELDS
from tracekit.contract.topology import Range
from tracekit.model import TKA1_REDUCTION

LENGTH = 512
LEAF = 128
CONTIGUOUS: dict[int, tuple[Range, ...]] = {0: ((0, 256),), 1: ((256, 512),)}
ZIGZAG: dict[int, tuple[Range, ...]] = {0: ((0, 128), (384, 512)), 1: ((128, 384),)}
SPLIT = SplitRequest(SplitMode.FIXED, LEAF)


def identity(**changes: Any) -> dict[str, Any]:
    """An identity that states everything."""
    stated: dict[str, Any] = dict.fromkeys(FIELDS, "a" * 16)
    stated |= {"model_version": 0, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "batch_size": 1}
    return {**stated, "rope_theta": 1e6, "rope_scaling": None, "rotary_dim": 128, **changes}


def sharding(
    tp_rank: int, cp_rank: int, owners: dict[int, tuple[Range, ...]], *, tp: int = 2, **changes: Any
) -> Sharding:
    """What a rank owns."""
    sound: dict[str, Any] = {
        "tp_rank": tp_rank,
        "tp_world_size": tp,
        "cp_rank": cp_rank,
        "cp_world_size": len(owners),
        "global_q_heads": 32,
        "global_kv_heads": 8,
        "local_q_head_start": tp_rank * 32 // tp,
        "local_q_heads": 32 // tp,
        "local_kv_head_start": tp_rank * 8 // tp,
        "local_kv_heads": 8 // tp,
        "global_sequence_length": LENGTH,
        "blocks": owners[cp_rank],
    }
    return Sharding(**{**sound, **changes})


def readback(role: Role, shard: Sharding, **changes: Any) -> AttentionRuntimeReadback:
    """What a rank of a sound run says."""
    sound: dict[str, Any] = {
        "engine": f"test {role}",
        "modes": ("training",) if role is Role.TRAIN else ("chunked_prefill", "decode"),
        "dtype": "bfloat16",
        "reduction": TKA1_REDUCTION,
        "reduction_engine": "tka1",
        "split_kv": SPLIT,
        "effective_cp_world_size": shard.cp_world_size,
        "export_lse": True,
        "lse_base": "e",
        "core": Core("tka1 tka1=1", "leaves of 128 rows, aligned binary", "tka1", "gloo"),
        "scope_verified": True,
    }
    return AttentionRuntimeReadback(role=role, sharding=shard, **{**sound, **changes})


def leaves(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """The splits of 128 keys that an owner of ranges runs."""
    return tuple((at, at + LEAF) for start, stop in ranges for at in range(start, stop, LEAF))


def execution(ranges: tuple[Range, ...], **changes: Any) -> SplitExecution:
    """What runs on the keys of an owner."""
    sound: dict[str, Any] = {
        "requested": SPLIT,
        "actual_mode": SplitMode.FIXED,
        "actual_split_size": LEAF,
        "boundaries": leaves(ranges),
        "backend": "tka1",
    }
    return SplitExecution(**{**sound, **changes})


def plan_set(
    owners: dict[int, tuple[Range, ...]] = CONTIGUOUS, *, tp: int = 2, **changes: Any
) -> SplitKVRuntimePlanSet:
    """The plans of a sound side; `changes` are of every execution."""
    world = len(owners)
    entries = tuple(
        PlanEntry(Coordinate(0, tp_rank, cp_rank, owner), owners[owner], execution(owners[owner], **changes))
        for tp_rank, cp_rank, owner in product(range(tp), range(world), range(world))
    )
    return SplitKVRuntimePlanSet(1, tp, world, (LENGTH,), entries)


def ranks(
    role: Role, owners: dict[int, tuple[Range, ...]] = CONTIGUOUS, *, tp: int = 2
) -> list[AttentionRuntimeReadback]:
    """The readbacks of a sound side."""
    places = product(range(tp), range(len(owners)))
    return [readback(role, sharding(*place, owners, tp=tp)) for place in places]


@dataclass
class Pair:
    """Two sound sides; break one thing, then bind."""

    rollout: list[AttentionRuntimeReadback] = field(default_factory=lambda: ranks(Role.INFER))
    training: list[AttentionRuntimeReadback] = field(default_factory=lambda: ranks(Role.TRAIN))
    rollout_identity: dict[str, Any] = field(default_factory=identity)
    training_identity: dict[str, Any] = field(default_factory=identity)
    rollout_plan_set: SplitKVRuntimePlanSet | None = field(default_factory=plan_set)
    training_plan_set: SplitKVRuntimePlanSet | None = field(default_factory=plan_set)
    topology: TopologyPolicy = TopologyPolicy.MUST_MATCH

    def change(self, at: int = 1, **changes: Any) -> None:
        """Change one rank of the rollout side."""
        self.rollout[at] = replace(self.rollout[at], **changes)

    def bind(self) -> Binding:
        """Bind what is left."""
        return bind_attention_runtime_readbacks(**vars(self))
