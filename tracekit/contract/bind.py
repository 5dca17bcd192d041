"""`bind_attention_runtime_readbacks`: may the numbers of two sides be compared, and is the binding strict?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tracekit.contract.boundary import claim_boundary
from tracekit.contract.codes import Issue, Tier
from tracekit.contract.identity import check_identity, fingerprint, identity_fingerprint
from tracekit.contract.plan_set import SplitKVRuntimePlanSet, check_plan_sets
from tracekit.contract.readback import AttentionRuntimeReadback
from tracekit.contract.reduction import check_reduction
from tracekit.contract.runtime import Side, by_rank, check_runtime
from tracekit.contract.topology import TopologyPolicy, check_topology

SCHEMA = "tracekit.attention_binding.v1"


@dataclass(frozen=True)
class Binding:
    """What came of binding two sides.

    Args:
        comparable: whether a number computed from the pair means anything; an issue of the identical tier
            says no.
        passed: whether it is comparable and no issue of the semantic tier is left.
        incomplete: whether a rank is missing or failed, so that nobody can say more.
        issues: every reason against, in the order of the checks.
        recorded_differences: what differs and may, name -> both values.
        fingerprints: of identity, reduction and the whole.
        boundary: what this evidence says and does not say.
        bits: what was compared in bits, where rows were; see `tracekit.contract.bits`.
    """

    comparable: bool
    passed: bool
    incomplete: bool
    issues: tuple[Issue, ...]
    recorded_differences: Mapping[str, Mapping[str, Any]]
    fingerprints: Mapping[str, str]
    boundary: tuple[str, ...]
    bits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """`passed`, `not comparable`, `refused` or, when evidence is missing, `inconclusive`."""
        if self.passed:
            return "passed"
        if self.incomplete:
            return "inconclusive"
        return "refused" if self.comparable else "not comparable"

    def codes(self) -> list[str]:
        """Return the code of each issue."""
        return [issue.code for issue in self.issues]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types, in the words of RL-Kernel's binding and some more."""
        return {
            "schema_version": SCHEMA,
            "status": self.status,
            "comparable": self.comparable,
            "passed": self.passed,
            "issues": [issue.to_dict() for issue in self.issues],
            **{f"{name}_fingerprint": value for name, value in self.fingerprints.items()},
            "recorded_differences": {name: dict(both) for name, both in self.recorded_differences.items()},
            "bits": dict(self.bits),
            "claim_boundary": list(self.boundary),
        }


def bind_attention_runtime_readbacks(
    *,
    rollout: Sequence[AttentionRuntimeReadback],
    training: Sequence[AttentionRuntimeReadback],
    rollout_identity: Mapping[str, Any],
    training_identity: Mapping[str, Any],
    rollout_plan_set: SplitKVRuntimePlanSet | None = None,
    training_plan_set: SplitKVRuntimePlanSet | None = None,
    topology: TopologyPolicy = TopologyPolicy.MUST_MATCH,
    allow_dtype_difference: bool = False,
    further: Sequence[Issue] = (),
    bits: Mapping[str, Any] | None = None,
) -> Binding:
    """Bind what a serving side and a training side executed.

    Args:
        rollout: a readback of each serving rank.
        training: a readback of each training rank.
        rollout_identity: the fields of `tracekit.contract.identity.FIELDS`, JSON values.
        training_identity: the same of the training side.
        rollout_plan_set: the split plans that ran; None where nobody observed them.
        training_plan_set: the same of the training side.
        topology: whether both sides must be cut alike.
        allow_dtype_difference: for a sweep against a reference of another dtype only.
        further: issues of other evidence, such as rows that differ in bits.
        bits: what was compared in bits.

    Returns:
        A binding. It is never an exception: what cannot be bound is an issue, and all issues are told.
    """
    sides = by_rank(rollout), by_rank(training)
    issues = [
        *check_identity(rollout_identity, training_identity),
        *check_topology([r.sharding for r in rollout], [r.sharding for r in training], topology),
        *check_runtime(*sides, allow_dtype_difference=allow_dtype_difference),
        *check_reduction(*({name: r.reduction for name, r in side.items()} for side in sides)),
        *check_plan_sets(
            rollout_plan_set, training_plan_set, owners_match=topology is TopologyPolicy.MUST_MATCH
        ),
        *_plans_fit("rollout", rollout, rollout_plan_set),
        *_plans_fit("training", training, training_plan_set),
        *further,
    ]
    tiers = {issue.tier for issue in issues}
    comparable = Tier.IDENTICAL not in tiers
    return Binding(
        comparable=comparable,
        passed=comparable and Tier.SEMANTIC not in tiers,
        incomplete=any(issue.code in {"RUNTIME_INCOMPLETE", "RUNTIME_ERROR"} for issue in issues),
        issues=tuple(issues),
        recorded_differences=_recorded_differences(*sides),
        fingerprints=_fingerprints(rollout, training, rollout_identity, training_identity),
        boundary=claim_boundary(rollout, training, topology, bits),
        bits=bits or {},
    )


def _plans_fit(
    side: str, readbacks: Sequence[AttentionRuntimeReadback], plans: SplitKVRuntimePlanSet | None
) -> Iterator[Issue]:
    """The plans belong to the ranks that told them: world, request, owners and dtype of the merge."""
    if plans is None or not readbacks:
        return
    field = f"{side}.split_kv_runtime_plan_set"
    if readbacks[0].sharding.world != (plans.tp_world_size, plans.cp_world_size):
        yield Issue(
            "SPLIT_KV_MISMATCH", field, f"the plans of the {side} side ran on another number of ranks."
        )
        return
    asked = {readback.sharding.rank: readback.split_kv for readback in readbacks}
    for entry in plans.entries:
        at, planned = entry.coordinate, entry.execution.requested
        if asked.get((at.tp_rank, at.cp_rank), planned) != planned:
            yield Issue(
                "SPLIT_KV_MISMATCH",
                field,
                f"a rank of the {side} side was asked for another split than it planned, first {at}.",
            )
            break
    owned = {readback.sharding.cp_rank: readback.sharding.blocks for readback in readbacks}
    length = readbacks[0].sharding.global_sequence_length
    for entry in plans.entries:
        owner, total = entry.coordinate.owner_cp_rank, plans.total_kv_tokens[entry.coordinate.batch_index]
        if total == length and entry.expected_kv_ranges != owned.get(owner, entry.expected_kv_ranges):
            yield Issue(
                "SPLIT_KV_MISMATCH",
                field,
                f"owner {owner} of the {side} side held other keys than the plan of {entry.coordinate} says.",
            )
            break
    told = {readback.sharding.rank: readback.reduction for readback in readbacks}
    for entry in plans.entries:
        at, ran = entry.coordinate, entry.execution
        spec = told.get((at.tp_rank, at.cp_rank))
        merged = ran.merge_order, ran.acc_dtype, ran.downcast_at
        if spec is not None and merged != (spec.order, spec.accumulate, spec.downcast):
            yield Issue(
                "SPLIT_KV_MISMATCH", field, f"a rank of the {side} side states two reductions, first {at}."
            )
            break


def _recorded_differences(rollout: Side, training: Side) -> dict[str, dict[str, Any]]:
    """What is free to differ: read off one rank a side where all ranks agree, else a list."""
    views = [_recorded(side) for side in (rollout, training)]
    return {
        name: {"rollout": views[0].get(name), "training": views[1].get(name)}
        for name in sorted({*views[0], *views[1]})
        if views[0].get(name) != views[1].get(name)
    }


def _recorded(side: Side) -> dict[str, Any]:
    said: dict[str, set[str]] = {}
    for readback in side.values():
        facts = {
            "engine": readback.engine,
            "modes": ", ".join(readback.modes),
            "actual_backend": readback.core.actual_backend,
            "communication_backend": readback.core.communication_backend,
            "reduction.engine": readback.reduction_engine,
            **{f"recorded.{name}": value for name, value in readback.recorded.items()},
        }
        for name, value in facts.items():
            said.setdefault(name, set()).add(value)
    return {name: min(values) if len(values) == 1 else sorted(values) for name, values in said.items()}


def _fingerprints(
    rollout: Sequence[AttentionRuntimeReadback],
    training: Sequence[AttentionRuntimeReadback],
    rollout_identity: Mapping[str, Any],
    training_identity: Mapping[str, Any],
) -> dict[str, str]:
    told = (None if r.reduction is None else sorted(r.reduction.to_dict().items()) for r in training)
    reductions = sorted({str(reduction) for reduction in told})
    said = {
        "identity": identity_fingerprint(training_identity),
        "rollout_identity": identity_fingerprint(rollout_identity),
        "reduction": fingerprint(reductions),
    }
    ran = [[fingerprint(asdict(readback)) for readback in side] for side in (rollout, training)]
    return {**said, "binding": fingerprint([said, ran])}
