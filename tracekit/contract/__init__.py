"""The strict binding of a training side and a serving side (docs/binding.md)."""

from tracekit.contract.bind import SCHEMA, Binding, bind_attention_runtime_readbacks
from tracekit.contract.codes import CODES, Issue, Tier
from tracekit.contract.plan_set import Coordinate, PlanEntry, SplitKVRuntimePlanSet
from tracekit.contract.readback import (
    AttentionRuntimeReadback,
    Core,
    Knob,
    Role,
    Stage,
    State,
)
from tracekit.contract.reduction import unsupported_reduction_reason
from tracekit.contract.split import SplitExecution, SplitMode, SplitRequest
from tracekit.contract.topology import Sharding, TopologyPolicy

__all__ = [
    "CODES",
    "SCHEMA",
    "AttentionRuntimeReadback",
    "Binding",
    "Coordinate",
    "Core",
    "Issue",
    "Knob",
    "PlanEntry",
    "Role",
    "Sharding",
    "SplitExecution",
    "SplitKVRuntimePlanSet",
    "SplitMode",
    "SplitRequest",
    "Stage",
    "State",
    "Tier",
    "TopologyPolicy",
    "bind_attention_runtime_readbacks",
    "unsupported_reduction_reason",
]
