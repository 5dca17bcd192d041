"""The answer of an indexer in the form in which answers are compared: one row of numbers a query row."""

import numpy as np

from tracekit.errors import ProviderFailed, Unsupported
from tracekit.model import Bits, DType, RequestKey
from tracekit.providers.indexers import IndexerAnswer, IndexerLaunch
from tracekit.replayer.messages import Answered

_EXACT = 1 << 24
"""Ids below it are exact as binary32, which is how places and values are shown."""


def gather_choices(launch: IndexerLaunch, answer: IndexerAnswer) -> Answered:
    """Check an answer against its launch: `out` holds ids `[n, 1, k]`, -1 where fewer, `lse` their scores.

    Raises:
        ProviderFailed: `P-ANSWER`, an answer is missing or speaks of another number of rows or keys.
        Unsupported: `P-REFUSED`, an id of 2^24 or more.
    """
    calls = launch.calls
    if len(answer.chosen) != len(calls):
        raise _wrong(f"{len(answer.chosen)} answers to {len(calls)} calls")
    requests: dict[RequestKey, int] = {}
    ids, scores, request = [], [], []
    for call, chosen in zip(calls, answer.chosen, strict=True):
        counts = np.diff(chosen.top_k.offsets)
        if chosen.top_k.rows != call.num_rows or (counts > call.k).any():
            raise _wrong(f"choices of {chosen.top_k.rows} rows where {call.num_rows} were asked for")
        if chosen.scores.shape != chosen.top_k.ids.shape or chosen.scores.dtype is not DType.FLOAT32:
            raise _wrong(f"scores {chosen.scores} of {chosen.top_k.ids.size} keys")
        if chosen.top_k.ids.max(initial=0) >= _EXACT:
            raise Unsupported(f"ids of {_EXACT:,} and more are not compared.", rule="P-REFUSED")
        filled = np.arange(call.k) < counts[:, None]
        table, value = np.full(filled.shape, -1.0, np.float32), np.zeros(filled.shape, np.uint32)
        table[filled], value[filled] = chosen.top_k.ids, chosen.scores.data
        ids.append(table.view(np.uint32)[:, None])
        scores.append(value[:, None])
        numbers = [requests.setdefault(key, len(requests)) for key in call.rows.requests]
        request.append(np.array(numbers, np.int32)[call.rows.request])
    return Answered(
        tuple(requests),
        np.concatenate(request),
        np.concatenate([call.rows.positions for call in calls]),
        Bits(np.concatenate(ids), DType.FLOAT32),
        Bits(np.concatenate(scores), DType.FLOAT32),
        answer.executed,
    )


def _wrong(what: str) -> ProviderFailed:
    return ProviderFailed(f"the indexer gave {what}; it answers every row of every call.", rule="P-ANSWER")
