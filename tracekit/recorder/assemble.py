"""The end of a recording: what was kept becomes calls, now that the requests have their keys."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tracekit.model import (
    Array,
    AttentionCall,
    Bits,
    Gradients,
    IndexerCall,
    KVFamily,
    KVRows,
    Mode,
    Origin,
    Output,
    RequestKey,
    Rows,
)
from tracekit.recorder.kept import Kept, KeptIndexer
from tracekit.recorder.observation import IndexerObservation, LateGradients, Observation
from tracekit.recorder.requests import RequestTable

Derive = Callable[[AttentionCall], Bits]


def attention_call(
    kept: Kept, seen: Observation, requests: RequestTable, rank: int, derive: Derive | None
) -> AttentionCall:
    """Return a kept launch as a call, with a derived LSE where its kernel gave none.

    Raises:
        TracekitError: the launch breaks a rule.
    """
    kv = {
        requests.key(handle): {family: extent.rows() for family, extent in families.items()}
        for handle, families in kept.kv.items()
    }
    rows = _rows(seen, requests, requests.tokens_of(seen))
    gradients = _gradients(seen.gradients, requests)
    call = call_of(seen, rows, kv, kept.step, kept.mode, rank=rank, launch=seen.launch, grads=gradients)
    if call.lse is None and derive is not None:
        call = replace(call, lse=Output(derive(call), Origin.DERIVED))
    return call


def call_of(
    seen: Observation,
    rows: Rows,
    kv: Mapping[RequestKey, Mapping[KVFamily, KVRows]],
    step: int = 0,
    mode: Mode = Mode.PREFILL,
    **more: Any,
) -> AttentionCall:
    """Return a launch that was seen as a call of rows and KV whose requests are known.

    Args:
        seen: the launch.
        rows: its rows.
        kv: the KV of their requests.
        step: of the trace.
        mode: why it was made.
        more: fields of the call that nobody saw in the launch itself.
    """
    return AttentionCall(
        layer=seen.layer,
        step=step,
        mode=mode,
        rows=rows,
        q=seen.q,
        kv=kv,
        sink=seen.sink,
        selection=seen.selection,
        conventions=seen.conventions,
        provenance=seen.provenance,
        out=seen.out,
        lse=seen.lse,
        **more,
    )


def _gradients(late: LateGradients | None, requests: RequestTable) -> Gradients | None:
    if late is None or late.d_out is None:
        return None
    d_kv = {requests.key(handle): families for handle, families in late.d_kv.items()}
    return Gradients(late.d_out, late.d_q, d_kv, late.d_sink)


def indexer_call(kept: KeptIndexer, requests: RequestTable) -> IndexerCall:
    """Return a kept launch of an indexer as a call.

    Raises:
        TracekitError: the launch breaks a rule.
    """
    keys = {requests.key(handle): extent.rows() for handle, extent in kept.keys.items()}
    return indexer_call_of(kept.seen, _rows(kept.seen, requests, kept.token_ids), keys, kept.step)


def indexer_call_of(
    seen: IndexerObservation, rows: Rows, keys: Mapping[RequestKey, KVRows], step: int = 0
) -> IndexerCall:
    """Return a launch of an indexer that was seen as a call of rows and keys whose requests are known."""
    return IndexerCall(
        layer=seen.layer,
        step=step,
        rows=rows,
        query=seen.query,
        weights=seen.weights,
        keys={key: held.keys.part((slice(None), 0)) for key, held in keys.items()},
        top_k=seen.top_k,
        provenance=seen.provenance,
        k=seen.k,
        family=seen.family,
        scale_bits=seen.scale_bits,
        scores=seen.scores,
    )


def _rows(seen: Observation | IndexerObservation, requests: RequestTable, token_ids: Array) -> Rows:
    keys = tuple(requests.key(handle) for handle in seen.requests)
    return Rows(keys, seen.request, seen.positions, token_ids)
