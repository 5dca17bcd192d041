"""Answers whose equal bits would prove nothing: numbers that are none, and outputs that nobody wrote."""

import numpy as np

from tracekit.model import AttentionCall, Bits


def hollow(call: AttentionCall, out: Bits) -> str:
    """Return why O proves nothing although it may be the same in every variant, or an empty text.

    A NaN or an infinity is equal to itself in every arrangement, and so is memory that was zero before a
    launch that did nothing.

    Args:
        call: the call.
        out: O `[T, H, Dv]` of the kernel, rows in any order.
    """
    values = out.to_float32()
    if not np.isfinite(values).all():
        return "O holds a NaN or an infinity"
    if values.any() or not call.selection.counts().any():
        return ""
    given = (rows.value_bits.data for families in call.kv.values() for rows in families.values())
    return (
        "every value of O is zero, and values that it is made of are not" if any(map(np.any, given)) else ""
    )
