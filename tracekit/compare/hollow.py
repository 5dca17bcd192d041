"""Answers whose equal bits would prove nothing: numbers that are none, and outputs that nobody wrote."""

from collections.abc import Mapping

import numpy as np

from tracekit.model import AttentionCall, Bits, KVFamily, KVRows, RequestKey


def hollow(call: AttentionCall, out: Bits, lse: Bits | None = None) -> str:
    """Return why an answer proves nothing although it may be the same everywhere, or an empty text.

    A NaN or an infinity is equal to itself in every arrangement, and so is memory that was zero before a
    launch that did nothing. The LSE of a row without keys may be anything.

    Args:
        call: the call.
        out: O `[T, H, Dv]`, rows as in the call.
        lse: LSE `[T, H]` in binary32; None where there is none.
    """
    values = out.to_float32()
    if not np.isfinite(values).all():
        return "O holds a NaN or an infinity"
    sees = call.selection.counts() > 0
    if lse is not None and not np.isfinite(lse.to_float32()[sees]).all():
        return "LSE holds a NaN or an infinity"
    if values.any() or not sees.any():
        return ""
    given = (rows.value_bits.data for families in call.kv.values() for rows in families.values())
    return (
        "every value of O is zero, and values that it is made of are not" if any(map(np.any, given)) else ""
    )


def hollow_gradients(
    call: AttentionCall,
    d_q: Bits | None,
    d_kv: Mapping[RequestKey, Mapping[KVFamily, KVRows]],
    d_sink: Bits | None,
) -> str:
    """Return why gradients prove nothing although they may be the same everywhere, or an empty text.

    dV sums dO by probabilities that are above zero, so gradients of KV that are all zero were not written. dQ
    may be zero: a row that sees one key has none.

    Args:
        call: the call, with the dO that went in.
        d_q: `[T, H, D]`, or None where there is none.
        d_kv: per request and family, shaped as its keys and values; empty where there are none.
        d_sink: `[H]`, or None where there is none.
    """
    rows = [one for families in d_kv.values() for one in families.values()]
    kv = [bits.to_float32() for one in rows for bits in (one.keys, one.value_bits)]
    named = [
        ("dQ", [d_q.to_float32()] if d_q else []),
        ("dKV", kv),
        ("dsink", [d_sink.to_float32()] if d_sink else []),
    ]
    for name, found in named:
        if not all(np.isfinite(values).all() for values in found):
            return f"{name} holds a NaN or an infinity"
    if not kv or call.grads is None or any(map(np.any, kv)):
        return ""
    given = call.grads.d_out.to_float32()[call.selection.counts() > 0]
    return "every gradient of keys and values is zero, and dO is not" if given.any() else ""
