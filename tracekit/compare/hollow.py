"""Answers whose equal bits would prove nothing: numbers that are none, and outputs that nobody wrote."""

import numpy as np

from tracekit.model import AttentionCall, Bits


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
