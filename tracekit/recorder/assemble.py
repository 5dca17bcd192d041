"""The end of a recording: what was kept becomes calls, now that the requests have their keys."""

from collections.abc import Callable
from dataclasses import replace

from tracekit.model import (
    Array,
    AttentionCall,
    Bits,
    Gradients,
    IndexerCall,
    Origin,
    Output,
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
    call = AttentionCall(
        layer=seen.layer,
        step=kept.step,
        mode=kept.mode,
        rows=_rows(seen, requests, requests.tokens_of(seen)),
        q=seen.q,
        kv={
            requests.key(handle): {family: extent.rows() for family, extent in families.items()}
            for handle, families in kept.kv.items()
        },
        sink=seen.sink,
        selection=seen.selection,
        conventions=seen.conventions,
        provenance=seen.provenance,
        out=seen.out,
        lse=seen.lse,
        launch=seen.launch,
        rank=rank,
        grads=_gradients(seen.gradients, requests),
    )
    if call.lse is None and derive is not None:
        call = replace(call, lse=Output(derive(call), Origin.DERIVED))
    return call


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
    seen = kept.seen
    keys = {requests.key(handle): extent.rows().keys for handle, extent in kept.keys.items()}
    return IndexerCall(
        layer=seen.layer,
        step=kept.step,
        rows=_rows(seen, requests, kept.token_ids),
        query=seen.query,
        weights=seen.weights,
        keys={key: bits.part((slice(None), 0)) for key, bits in keys.items()},
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
