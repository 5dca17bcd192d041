"""A readback from what an engine executed: launches that were recorded, never what was asked for.

What an engine's own kernel does not reveal is `unobservable`: in which order it sums keys, and where it cuts
them. Of TKA-1 both are proved by the bits: each leaf is computed alone from the rows that ran, the leaves are
merged in TKA-1's tree, and O and LSE must be those that ran.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracekit.contract import (
    AttentionRuntimeReadback,
    Coordinate,
    Core,
    Knob,
    PlanEntry,
    Role,
    Sharding,
    SplitExecution,
    SplitMode,
    SplitRequest,
    State,
)
from tracekit.contract.folder import RankFile, write_rank
from tracekit.contract.readback import core_id
from tracekit.contract.reduction import schedule
from tracekit.contract.refuse import refuse
from tracekit.contract.shards import digests, shard_pieces
from tracekit.model import TKA1_REDUCTION, AttentionCall, Mode, Origin, Recording
from tracekit.providers import tka1
from tracekit.providers.portable import inputs
from tracekit.providers.tka1 import LEAF, numpy_form

TKA1 = "tka1"


@dataclass(frozen=True)
class Asked:
    """What was asked of an engine.

    Args:
        kernel: that should run.
        split: how it should cut its keys.
    """

    kernel: str
    split: SplitRequest


TKA1_ASKED = Asked(TKA1, SplitRequest(SplitMode.FIXED, LEAF))


def leave(
    folder: Path,
    role: Role,
    asked: Asked,
    recording: Recording,
    calls: Sequence[AttentionCall],
    problems: Sequence[str] = (),
    recorded: Mapping[str, str] | None = None,
) -> None:
    """Write the file of the one rank of a side.

    Args:
        folder: the run.
        role: which side.
        asked: what was asked of the engine.
        recording: of the run.
        calls: that ran.
        problems: of the recording.
        recorded: what else is worth keeping.

    Raises:
        BindingInvalid: `B-READBACK` where nothing ran: a readback is told after execution.
    """
    if not calls:
        refuse("B-READBACK", "nothing ran yet; a readback is told after execution.")
    length = max(rows.end for call in calls for kv in call.kv.values() for rows in kv.values())
    cuts = _proved_leaves(calls, length)
    told = _readback(role, asked, recording, calls, problems, recorded or {}, length, proved=bool(cuts))
    plans: tuple[PlanEntry, ...] = ()
    if cuts:
        odd = None if asked == TKA1_ASKED else "TKA-1 ran and cuts at its leaves"
        ran = SplitExecution(
            asked.split,
            SplitMode.FIXED,
            LEAF,
            cuts,
            backend=told.core.actual_backend,
            fallback=odd is not None,
            fallback_reason=odd,
        )
        plans = (PlanEntry(Coordinate(0, 0, 0, 0), ((0, length),), ran),)
    write_rank(folder, RankFile(told, (length,), plans, digests(shard_pieces(calls, told.sharding))))


def _readback(
    role: Role,
    asked: Asked,
    recording: Recording,
    calls: Sequence[AttentionCall],
    problems: Sequence[str],
    recorded: Mapping[str, str],
    length: int,
    *,
    proved: bool,
) -> AttentionRuntimeReadback:
    first = calls[0]
    kernels = sorted({call.provenance.executed.kernel for call in calls})
    exported = all(call.lse is not None and call.lse.origin is Origin.EXECUTED for call in calls)
    whole = not problems and bool(recording.ledger) and all(step.complete for step in recording.ledger)
    threads = sorted({call.provenance.threads for call in calls})
    return AttentionRuntimeReadback(
        role=role,
        engine=first.provenance.engine,
        modes=_modes(calls),
        dtype=first.dtype.value,
        sharding=_alone(first, length),
        reduction=TKA1_REDUCTION if proved else None,
        reduction_engine=kernels[0],
        split_kv=asked.split,
        effective_cp_world_size=1,
        export_lse=exported,
        lse_base="e" if exported else "",
        core=Core(
            core_id=", ".join(sorted({core_id(call.provenance.executed) for call in calls})),
            schedule=schedule(TKA1_REDUCTION) if proved else "",
            actual_backend=", ".join(kernels),
            fallback=kernels != [asked.kernel],
        ),
        scope_verified=whole,
        knobs={"attention_kernel": _kernel_knob(asked, kernels), "split_kv": _split_knob(asked, proved)},
        recorded={
            "launches": str(len(calls)),
            "threads": " ".join(map(str, threads)) if any(threads) else "not told",
            "isa": first.provenance.executed.isa or "any",
            "block_tables": _tables(calls),
            **recorded,
        },
    )


def _alone(call: AttentionCall, length: int) -> Sharding:
    """One rank that owns every head and token of its launches."""
    return Sharding(
        tp_rank=0,
        tp_world_size=1,
        cp_rank=0,
        cp_world_size=1,
        global_q_heads=call.num_heads,
        global_kv_heads=call.num_kv_heads,
        local_q_head_start=0,
        local_q_heads=call.num_heads,
        local_kv_head_start=0,
        local_kv_heads=call.num_kv_heads,
        global_sequence_length=length,
        blocks=((0, length),),
    )


def _modes(calls: Sequence[AttentionCall]) -> tuple[str, ...]:
    """The modes of launches in order; a prefill that ran in several launches was chunked."""
    prefills = {call.step for call in calls if call.mode is Mode.PREFILL}
    words = [
        "chunked_prefill" if call.mode is Mode.PREFILL and len(prefills) > 1 else call.mode.value
        for call in calls
    ]
    return tuple(dict.fromkeys(words))


def _tables(calls: Sequence[AttentionCall]) -> str:
    """The pages of the last launch, as the kernel got them."""
    plan = calls[-1].launch
    if plan is None or not plan.block_tables:
        return "not told" if plan is None else "none"
    return " ".join(map(str, plan.block_tables[0].tolist())) + f" of {plan.page_size} rows"


def _kernel_knob(asked: Asked, ran: list[str]) -> Knob:
    if ran == [asked.kernel]:
        return Knob(asked.kernel, asked.kernel, State.APPLIED)
    reason = f"{', '.join(ran)} ran where {asked.kernel} was asked for"
    return Knob(asked.kernel, ", ".join(ran), State.FALLBACK, reason)


def _split_knob(asked: Asked, proved: bool) -> Knob:
    requested = f"{asked.split.mode} {asked.split.fixed_split_size or ''}".strip()
    if not proved:
        return Knob(requested, None, State.UNOBSERVABLE, "the kernel does not tell where it cut its keys")
    ran = f"fixed {LEAF}"
    if requested == ran:
        return Knob(requested, ran, State.APPLIED)
    return Knob(requested, ran, State.FALLBACK, "TKA-1 ran and cuts at its leaves")


def _proved_leaves(calls: Sequence[AttentionCall], length: int) -> tuple[tuple[int, int], ...]:
    """The leaves of TKA-1, where their merge in its tree, and in no other, gives the bits of every launch.

    None otherwise. Up to three leaves merge alike in every tree: launches that see no more prove none.
    """
    if not all(call.provenance.executed.kernel == TKA1 and _can_merge(call) for call in calls):
        return ()
    if not all(_ran(call, left_fold=False) for call in calls):
        return ()
    if all(_ran(call, left_fold=True) for call in calls):
        return ()
    return tuple((start, min(start + LEAF, length)) for start in range(0, length, LEAF))


def _can_merge(call: AttentionCall) -> bool:
    return call.sink is None and call.out is not None and call.lse is not None


def _ran(call: AttentionCall, *, left_fold: bool) -> bool:
    """Whether leaves that are computed alone merge to O and LSE of a launch."""
    assert call.out is not None
    assert call.lse is not None
    merged = merged_leaves(call, left_fold=left_fold)
    pairs = (merged.out, call.out.bits.data), (merged.lse, call.lse.bits.data)
    return all(ours.tobytes() == theirs.tobytes() for ours, theirs in pairs)


def merged_leaves(call: AttentionCall, *, left_fold: bool) -> tka1.Outputs:
    """Compute each leaf of a launch alone, and merge them in TKA-1's tree or as a left fold."""
    launch = inputs(call)
    stop = max(rows.end for kv in call.kv.values() for rows in kv.values())
    runs = [tka1.Run(0, leaf, 0) for leaf in range(-(-stop // LEAF))]
    parts = {run: tka1.partials(launch, run=run) for run in runs}
    if left_fold:
        return numpy_form.merge(list(enumerate(parts.values())), None, call.dtype, left_fold=True)
    return tka1.merge(parts, dtype=call.dtype)
