"""Gradients of a variant against those of the baseline, in bits."""

from dataclasses import replace

import numpy as np

from tracekit.compare import Comparison, compare_bits
from tracekit.model import AttentionCall, Bits, KVFamily, KVRows, RequestKey, Rows
from tracekit.replayer.messages import Answered


def compare_gradients(
    call: AttentionCall, baseline: Answered, answered: Answered
) -> tuple[Comparison, str | None]:
    """Compare every gradient that the baseline has and the variant promises.

    Args:
        call: the call.
        baseline: the answer to it in one launch.
        answered: the answer to a variant.

    Returns:
        The comparison, and the name of a promised gradient that the variant lacks, if there is one. A
        gradient of KV stands at (request, row of KV) of its family, one of a sink at no request.
    """
    found, absent = Comparison(), None
    if baseline.d_q is not None and "d_q" not in answered.free:
        if answered.d_q is None:
            absent = "d_q"
        else:
            places, rows = answered.aligned(call.rows)
            pair = baseline.d_q.take(rows), answered.d_q.take(places)
            found += compare_bits({"d_q": pair}, call.rows, call.layer, rows)
    if "d_kv" not in answered.free:
        present = {key for key in answered.requests if key in baseline.d_kv}
        for key in sorted(present):
            for family, rows_of in baseline.d_kv[key].items():
                got = answered.d_kv.get(key, {}).get(family)
                if got is None:
                    absent = absent or f"d_kv of request {key}"
                else:
                    found += _kv(key, family, rows_of, got, call.layer)
    if baseline.d_sink is not None and "d_sink" not in answered.free:
        if answered.d_sink is None:
            absent = absent or "d_sink"
        else:
            found += _sink(baseline.d_sink, answered.d_sink, call)
    return found, absent


def _kv(key: RequestKey, family: KVFamily, want: KVRows, got: KVRows, layer: int) -> Comparison:
    """Compare the gradients of the rows that both hold: a chunk holds fewer."""
    first, end = max(want.first, got.first), min(want.end, got.end)
    want, got = want.window(first, end), got.window(first, end)
    if not want.count:
        return Comparison()
    at = np.arange(first, end)
    rows = Rows((key,), np.zeros(at.size, np.int32), at, np.full(at.size, -1))
    pairs = {f"d_k of {family}": (want.keys, got.keys)}
    if not want.shared:
        pairs[f"d_v of {family}"] = (want.value_bits, got.value_bits)
    return compare_bits(pairs, rows, layer)


def _sink(want: Bits, got: Bits, call: AttentionCall) -> Comparison:
    one = np.zeros(1, np.int64)
    pair = Bits(want.data[None], want.dtype), Bits(got.data[None], got.dtype)
    found = compare_bits({"d_sink": pair}, call.rows, call.layer, one)
    place = found.first and replace(found.first, request="every request", position=0)
    return replace(found, first=place)
