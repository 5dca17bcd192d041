"""What a trace proves of a side by itself, against what the side says: nothing that is stored is believed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tracekit.compare.hollow import hollow, hollow_gradients
from tracekit.contract.codes import Issue
from tracekit.contract.identity import FIELDS, fingerprint, same
from tracekit.contract.readback import AttentionRuntimeReadback, core_id
from tracekit.contract.shards import digests, shard_pieces
from tracekit.contract.topology import rank_name
from tracekit.model import AttentionCall, Bits, LseBase, Mode, Origin, Recording, StepRecord

RowTensors = ("q", "out", "lse", "keys", "values")
"""Tensors of which each rank tells a digest; of gradients too, where its trace holds some."""


class TraceLike(Protocol):
    """What is read of a trace."""

    @property
    def recording(self) -> Recording:
        """Requests and model."""
        ...

    def __iter__(self) -> Iterator[AttentionCall]:
        """Yield the calls in recorded order."""
        ...


def derived_identity(recording: Recording, call: AttentionCall) -> dict[str, Any]:
    """Return the fields of the identity that a trace proves: tokens, positions, lengths and heads.

    Rows that were recorded are the active ones; requests are taken in the order of their keys.

    Args:
        recording: of the trace.
        call: one of its calls, for what all of them share.
    """
    requests = sorted(recording.requests, key=lambda request: request.key)
    tokens = [request.token_ids.tolist() for request in requests]
    positions = [list(range(len(row))) for row in tokens]
    return {
        "model_version": recording.identity.model_version,
        "token_ids_fingerprint": fingerprint(tokens),
        "active_mask_fingerprint": fingerprint([[True] * len(row) for row in tokens]),
        "position_ids_fingerprint": fingerprint(positions),
        "global_token_positions_fingerprint": fingerprint(positions),
        "kv_seq_lens_fingerprint": fingerprint([len(row) for row in tokens]),
        "q_heads": call.num_heads,
        "kv_heads": call.num_kv_heads,
        "head_dim": call.head_dim,
        "batch_size": len(requests),
    }


def check_evidence(
    side: str,
    stated: Mapping[str, Any],
    readbacks: Sequence[AttentionRuntimeReadback],
    told: Mapping[str, Mapping[str, str]],
    trace: TraceLike,
) -> Iterator[Issue]:
    """Yield an issue wherever a side says other things than its trace.

    Args:
        side: `rollout` or `training`.
        stated: the identity that it states.
        readbacks: of its ranks.
        told: rank name -> tensor -> digest that the rank told.
        trace: what was recorded.
    """
    calls = list(trace)
    proven = derived_identity(trace.recording, calls[0])
    for name in FIELDS:
        if name in proven and name in stated and not same(stated[name], proven[name]):
            yield Issue(
                "IDENTITY_MISMATCH",
                f"{side}.{name}",
                f"the {side} side states {name} {stated[name]}, and its trace holds {proven[name]}.",
                **{side: stated[name]},
            )
    yield from _complete(side, readbacks, trace.recording.ledger)
    yield from _hollow(side, calls)
    yield from _modes(side, readbacks, {call.mode for call in calls})
    yield from _kernels(side, readbacks, calls)
    for readback in readbacks:
        name = rank_name(*readback.sharding.rank)
        found = digests(shard_pieces(calls, readback.sharding))
        for tensor in sorted({*RowTensors, *found, *told.get(name, {})}):
            if told.get(name, {}).get(tensor) != found.get(tensor):
                yield Issue(
                    "EVIDENCE_MISMATCH",
                    f"{side}.{name}.digests.{tensor}",
                    f"{name} told another {tensor} than the trace of the {side} side holds for it.",
                )


def _complete(
    side: str, readbacks: Sequence[AttentionRuntimeReadback], ledger: Sequence[StepRecord]
) -> Iterator[Issue]:
    """A rank may say that its whole scope was seen where the ledger shows that no call was lost."""
    cut = next((line for line in ledger if not line.complete), None)
    if (cut is None and ledger) or not any(readback.scope_verified for readback in readbacks):
        return
    lost = (
        "has no ledger"
        if cut is None
        else f"lacks calls of step {cut.step}: {cut.cut or 'hooks did not fire'}"
    )
    yield Issue(
        "EVIDENCE_MISMATCH",
        f"{side}.scope_verified",
        f"the {side} side states that its whole scope was seen, and its trace {lost}.",
    )


def _hollow(side: str, calls: Sequence[AttentionCall]) -> Iterator[Issue]:
    """Equal bits of a NaN are equal garbage, and so are outputs that nobody wrote."""
    for call in calls:
        for name, given in _inputs(call):
            if not np.isfinite(given.to_float32()).all():
                yield Issue(
                    "BITS_NOT_COMPARED",
                    f"{side}.inputs",
                    f"{name} holds a NaN or an infinity, {side} layer {call.layer}, step {call.step}: "
                    "equal bits of it prove nothing.",
                )
                return
        lse = None if call.lse is None else call.lse.bits
        why = "" if call.out is None else hollow(call, call.out.bits, lse)
        if call.grads is not None and not why:
            why = hollow_gradients(call, call.grads.d_q, call.grads.d_kv, call.grads.d_sink)
        if why:
            yield Issue(
                "BITS_NOT_COMPARED",
                f"{side}.outputs",
                f"{why}, {side} layer {call.layer}, step {call.step}: equal bits of it prove nothing.",
            )
            return


def _inputs(call: AttentionCall) -> Iterator[tuple[str, Bits]]:
    """What a call was made of."""
    yield "Q", call.q
    if call.sink is not None:
        yield "the sink", call.sink
    for families in call.kv.values():
        for rows in families.values():
            yield "a key", rows.keys
            yield "a value", rows.value_bits


WORDS = {"chunked_prefill": Mode.PREFILL.value}
"""Words of a readback's modes that a trace says in another one."""


def _modes(side: str, readbacks: Sequence[AttentionRuntimeReadback], modes: set[Mode]) -> Iterator[Issue]:
    """A side trained or served as it says: another run's trace may hold the same bits."""
    held = sorted(mode.value for mode in modes)
    for readback in readbacks:
        told = sorted({WORDS.get(mode, mode) for mode in readback.modes})
        if told != held:
            yield Issue(
                "EVIDENCE_MISMATCH",
                f"{side}.{rank_name(*readback.sharding.rank)}.modes",
                f"the {side} side states {', '.join(readback.modes)}, and its trace holds {', '.join(held)}.",
            )
            return


def _kernels(
    side: str, readbacks: Sequence[AttentionRuntimeReadback], calls: Sequence[AttentionCall]
) -> Iterator[Issue]:
    ran = sorted({core_id(call.provenance.executed) for call in calls})
    for readback in readbacks:
        kernel = readback.core.core_id
        if ran != [kernel]:
            yield Issue(
                "EVIDENCE_MISMATCH",
                f"{side}.{rank_name(*readback.sharding.rank)}.core.core_id",
                f"the {side} side states the kernel {kernel or 'nobody knows'}, and its trace was computed "
                f"by {', '.join(ran)}.",
            )
            return
    silent = [call for call in calls if call.lse is None or call.lse.origin is not Origin.EXECUTED]
    if silent or any(call.conventions.lse_base is not LseBase.NATURAL for call in calls):
        yield Issue(
            "LSE_NOT_EXPORTED",
            f"{side}.lse",
            f"{len(silent)} of {len(calls)} calls of the {side} side have no LSE that its kernel executed, "
            "in nats.",
        )
    dtypes = sorted({call.dtype.value for call in calls})
    stated = sorted({readback.dtype for readback in readbacks})
    if stated and stated != dtypes:
        yield Issue(
            "EVIDENCE_MISMATCH",
            f"{side}.dtype",
            f"the {side} side states {stated}, its trace holds {dtypes}.",
        )
