"""The checks of what two sides executed: states, kernel, stages, LSE (B12 to B16)."""

from collections.abc import Iterator, Mapping, Sequence

from tracekit.contract.codes import Issue
from tracekit.contract.readback import SCOPES, AttentionRuntimeReadback, Role, Stage, State
from tracekit.contract.split import SplitMode
from tracekit.contract.topology import rank_name

Side = Mapping[str, AttentionRuntimeReadback]
"""Rank name -> readback."""

_STATE_CODES = {
    State.UNSUPPORTED: "RUNTIME_UNSUPPORTED",
    State.FALLBACK: "RUNTIME_FALLBACK",
    State.UNOBSERVABLE: "RUNTIME_UNOBSERVABLE",
    State.ERROR: "RUNTIME_ERROR",
}


def check_runtime(rollout: Side, training: Side, *, allow_dtype_difference: bool = False) -> Iterator[Issue]:
    """Yield the issues of what the ranks of two sides executed.

    Args:
        rollout: the serving side.
        training: the training side.
        allow_dtype_difference: for a sweep that compares a low-precision side with an FP32 reference.
    """
    for side, role, ranks in (("rollout", Role.INFER, rollout), ("training", Role.TRAIN, training)):
        yield from _complete(side, ranks)
        for name, readback in ranks.items():
            place = f"{side}.{name}"
            if readback.role is not role:
                yield Issue(
                    "ROLE_COLLISION", f"{place}.role", f"a rank of the {side} side is {readback.role}."
                )
            yield from _states(place, readback)
            yield from _exports(place, readback)
            yield from _core(place, readback)
            yield from _stages(place, readback)
    yield from _pair(rollout, training, allow_dtype_difference)


def _complete(side: str, ranks: Side) -> Iterator[Issue]:
    """Every rank of the world that the readbacks speak of must have left one."""
    if not ranks:
        yield Issue("RUNTIME_INCOMPLETE", side, f"no rank of the {side} side left a readback.")
        return
    tp_size, cp_size = next(iter(ranks.values())).sharding.world
    missing = [
        rank_name(tp, cp) for tp in range(tp_size) for cp in range(cp_size) if rank_name(tp, cp) not in ranks
    ]
    if missing:
        yield Issue(
            "RUNTIME_INCOMPLETE",
            f"{side}.{missing[0]}",
            f"{len(missing)} of {tp_size * cp_size} ranks of the {side} side left no readback.",
        )


def _states(place: str, readback: AttentionRuntimeReadback) -> Iterator[Issue]:
    if readback.state is not State.APPLIED:
        yield Issue(_STATE_CODES[readback.state], f"{place}.state", f"{place}: {readback.reason}.")
    for name, knob in readback.knobs.items():
        if knob.state is not State.APPLIED:
            yield Issue(_STATE_CODES[knob.state], f"{place}.knobs.{name}", f"{name}: {knob.reason}.")
    asked, ran = readback.sharding.cp_world_size, readback.effective_cp_world_size
    if asked != ran:
        yield Issue(
            "CP_FALLBACK",
            f"{place}.effective_cp_world_size",
            f"context parallelism over {asked} ranks was asked for and over {ran} ran.",
        )
    if readback.split_kv.mode is SplitMode.AUTO or not readback.split_kv.strict:
        yield Issue(
            "SPLIT_KV_REQUEST",
            f"{place}.split_kv",
            f"the split {readback.split_kv.mode} is not strict: shapes may change it.",
        )


def _exports(place: str, readback: AttentionRuntimeReadback) -> Iterator[Issue]:
    if not readback.export_lse or readback.lse_base != "e":
        said = f"in base {readback.lse_base}" if readback.export_lse else "not"
        yield Issue("LSE_NOT_EXPORTED", f"{place}.export_lse", f"the LSE of attention was {said} exported.")
    if not readback.scope_verified:
        yield Issue(
            "DETERMINISM_INCOMPATIBLE",
            f"{place}.scope_verified",
            "the rank did not check that nothing else touched its attention.",
        )


def _core(place: str, readback: AttentionRuntimeReadback) -> Iterator[Issue]:
    core = readback.core
    if not core.core_id:
        yield Issue("ATTENTION_CORE_MISSING", f"{place}.core.core_id", "no kernel is stated.")
    if not core.schedule:
        yield Issue("ATTENTION_CORE_SCHEDULE", f"{place}.core.schedule", "no schedule is stated.")
    if not core.actual_backend:
        yield Issue("ATTENTION_BACKEND_MISSING", f"{place}.core.actual_backend", "no backend is stated.")
    if readback.effective_cp_world_size > 1 and not core.communication_backend:
        yield Issue(
            "ATTENTION_BACKEND_MISSING",
            f"{place}.core.communication_backend",
            "partial states were exchanged, and nothing says by what.",
        )
    if core.fallback:
        yield Issue("RUNTIME_FALLBACK", f"{place}.core.fallback", "another kernel ran than was asked for.")
    if core.reference_only or not core.production_ready:
        yield Issue(
            "ATTENTION_NOT_PRODUCTION_READY",
            f"{place}.core.production_ready",
            "what ran is a reference, not the path that serves or trains.",
        )


def _stages(place: str, readback: AttentionRuntimeReadback) -> Iterator[Issue]:
    for name in sorted(SCOPES[readback.scope]):
        stage = readback.stages.get(name)
        if stage is None or not stage.backend_id:
            yield Issue(
                f"{_kind(name)}_MISSING", f"{place}.stages.{name}", f"nothing says what ran as {name}."
            )
        elif stage.fallback:
            yield Issue(
                "ATTENTION_PREPROCESS_FALLBACK" if _kind(name).endswith("PROCESS") else "RUNTIME_FALLBACK",
                f"{place}.stages.{name}",
                f"{name} fell back: {stage.fallback_reason}.",
            )


def _kind(stage: str) -> str:
    return "ATTENTION_PREPROCESS" if stage in {"qk_norm", "rope"} else "ATTENTION_PROJECTION"


def _pair(rollout: Side, training: Side, allow_dtype_difference: bool) -> Iterator[Issue]:
    sides = list(rollout.values()), list(training.values())
    if not all(sides):
        return
    compared = (
        ("core.core_id", "ATTENTION_CORE_MISMATCH"),
        ("core.schedule", "ATTENTION_CORE_SCHEDULE"),
        ("scope", "ATTENTION_CORE_MISMATCH"),
    ) + (() if allow_dtype_difference else (("dtype", "REDUCTION_SEMANTIC_MISMATCH"),))
    for path, code in compared:
        theirs, ours = (sorted({_at(readback, path) for readback in side}) for side in sides)
        if theirs != ours or len(theirs) > 1:
            yield Issue(code, path, f"{path} is not one on all ranks of both sides.", theirs, ours)
    for name in sorted({stage for side in sides for readback in side for stage in readback.stages}):
        theirs, ours = ([_stage(r.stages.get(name)) for r in side] for side in sides)
        if len({*theirs, *ours}) > 1:
            yield Issue(
                f"{_kind(name)}_MISMATCH",
                f"stages.{name}",
                f"{name} is not one on all ranks of both sides.",
                sorted(set(theirs)),
                sorted(set(ours)),
            )


def _at(readback: AttentionRuntimeReadback, path: str) -> str:
    value: object = readback
    for name in path.split("."):
        value = getattr(value, name)
    return str(value)


def _stage(stage: Stage | None) -> str:
    return "" if stage is None else f"{stage.backend_id} {stage.policy_id}{' fallback' * stage.fallback}"


def by_rank(readbacks: Sequence[AttentionRuntimeReadback]) -> Side:
    """Return readbacks by rank name, in rank order; of a rank that came twice the last (told elsewhere)."""
    ordered = sorted(readbacks, key=lambda readback: readback.sharding.rank)
    return {rank_name(*readback.sharding.rank): readback for readback in ordered}
