"""Bind two run folders: the readbacks, the evidence behind them, and the bits of the rows that both have."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tracekit.compare.diff import Diff, compare_traces
from tracekit.compare.layer_diff import EQUAL
from tracekit.contract.bind import Binding, bind_attention_runtime_readbacks
from tracekit.contract.codes import Issue
from tracekit.contract.evidence import check_evidence
from tracekit.contract.folder import Run, read_run
from tracekit.contract.plan_set import SplitKVRuntimePlanSet
from tracekit.contract.readback import Role
from tracekit.contract.topology import TopologyPolicy
from tracekit.errors import BindingInvalid
from tracekit.store import open_trace

OUTPUTS = ("out", "lse")
"""Tensors whose bits a binding speaks of; the inputs before them must be equal too."""


def bind_runs(
    training: str | Path,
    rollout: str | Path,
    *,
    topology: TopologyPolicy = TopologyPolicy.MUST_MATCH,
    allow_dtype_difference: bool = False,
) -> Binding:
    """Judge two runs. What they stored about themselves is checked against their traces, never believed.

    Args:
        training: the run folder of the training side.
        rollout: the run folder of the serving side.
        topology: whether both must be cut alike.
        allow_dtype_difference: for a sweep against a reference of another dtype only.

    Raises:
        BindingInvalid: a folder cannot be read as a run.
        TraceCorrupt, TraceTooNew, TraceUnreadable: a trace cannot be read.
    """
    sides = {"rollout": read_run(Path(rollout)), "training": read_run(Path(training))}
    further = [issue for side, run in sides.items() for issue in _head(side, run)]
    plans: dict[str, SplitKVRuntimePlanSet | None] = {}
    for side, run in sides.items():
        plans[side] = None
        try:
            plans[side] = run.plan_set()
        except BindingInvalid as error:
            further.append(Issue("SPLIT_KV_MISMATCH", f"{side}.split_kv_runtime_plan_set", str(error)))
    bits: dict[str, Any] = {"elements": 0, "rows": 0, "parts": [], "notes": []}
    with ExitStack() as stack:
        traces = {}
        for side, run in sides.items():
            if run.trace.is_file():
                traces[side] = stack.enter_context(open_trace(run.trace))
                further += check_evidence(side, run.identity, run.readbacks, run.told, traces[side])
        if len(traces) == 2:
            found = compare_traces(traces["training"], traces["rollout"], ("training", "rollout"))
            bits, more = _bits(found)
            further += more
        else:
            lone = [side for side in sides if side not in traces]
            further.append(
                Issue("BITS_NOT_COMPARED", "trace", f"the {' and the '.join(lone)} side left no trace.")
            )
    return bind_attention_runtime_readbacks(
        rollout=sides["rollout"].readbacks,
        training=sides["training"].readbacks,
        rollout_identity=sides["rollout"].identity,
        training_identity=sides["training"].identity,
        rollout_plan_set=plans["rollout"],
        training_plan_set=plans["training"],
        topology=topology,
        allow_dtype_difference=allow_dtype_difference,
        further=further,
        bits=bits,
    )


def _head(side: str, run: Run) -> Iterator[Issue]:
    """The run was asked to be of its side, and its ranks ran in the world that was asked for."""
    if run.head.role is not (Role.TRAIN if side == "training" else Role.INFER):
        yield Issue("ROLE_COLLISION", f"{side}.role", f"the {side} side was asked to {run.head.role}.")
    asked = run.head.tp_world_size, run.head.cp_world_size
    for rank in run.ranks:
        ran = rank.readback.sharding.world
        if ran != asked:
            yield Issue(
                "CP_FALLBACK" if ran[0] == asked[0] else "RUNTIME_FALLBACK",
                f"{side}.world",
                f"the {side} side was asked to run on tp {asked[0]}, cp {asked[1]} and ran on "
                f"tp {ran[0]}, cp {ran[1]}.",
            )
            return


def _bits(found: Diff) -> tuple[dict[str, Any], list[Issue]]:
    """What the two traces have in common in bits, and where they part."""
    outputs = [part for part in found.parts if part.tensor in OUTPUTS]
    told = {
        "elements": sum(part.compared.elements for part in outputs),
        "rows": max((part.compared.rows for part in outputs), default=0),
        "parts": [
            {"layer": part.layer, "tensor": part.tensor, "verdict": part.verdict,
             "compared": part.compared.elements, "differ": part.differences.elements}
            for part in found.parts
        ],
        "notes": list(found.notes),
    }  # fmt: skip
    first = found.first
    if first is not None:
        place = None if first.place is None else first.place.to_dict()
        return told, [
            Issue(
                "BITS_DIFFER",
                f"layer {first.layer}.{first.tensor}",
                f"the sides part at {first.tensor} of layer {first.layer}: "
                f"{first.differences.elements:,} of {first.compared.elements:,} values differ.",
                training=place,
            )
        ]
    silent = [part for part in outputs if part.verdict != EQUAL or not part.compared.elements]
    alone = [note for note in found.notes if ": layers " in note]  # rows and gradients may be of one side
    if silent or alone or not outputs:
        reasons = {part.reason for part in silent if part.reason} | {*alone}
        why = "; ".join(sorted(reasons)) or "no row is on both sides"
        return told, [Issue("BITS_NOT_COMPARED", "trace", f"not every output was compared: {why}.")]
    return told, []
