"""Whether an answer is one: shape, dtype, and numbers that are finite, read from the bits."""

import numpy as np

from tracekit.gate.refusal import refuse
from tracekit.model import Array, AttentionCall, Bits, DType
from tracekit.providers.base import Tensors

_INFINITY = {
    DType.BFLOAT16: (np.int16, 0x7F80, 0xFF80),
    DType.FLOAT16: (np.int16, 0x7C00, 0xFC00),
    DType.FLOAT32: (np.int32, 0x7F800000, 0xFF800000),
}
"""A signed view, and the patterns of +inf and -inf: as signed numbers NaNs and infinities above zero are the
largest, as unsigned ones those below zero are. Two maxima need no memory, a mask would."""

_max = np.maximum.reduce
"""What `array.max()` calls in the end; on the small answers of a decode the way there costs as much again."""


def finite(bits: Bits) -> bool:
    """Whether no element is a NaN or an infinity."""
    if bits.dtype not in _INFINITY:
        return bool(np.isfinite(bits.to_float32()).all())
    data = bits.data.reshape(-1)
    signed, above, below = _INFINITY[bits.dtype]
    return data.size == 0 or bool(_max(data) < below and _max(data.view(signed)) < above)


def check_answer(call: AttentionCall, answer: Tensors) -> None:
    """Refuse an answer that cannot be one. The LSE of a row without keys may be anything.

    Raises:
        GateRefused: `G-SHAPE`, `G-NON-FINITE`.
    """
    out, lse = answer.out, answer.lse
    rows = call.q.data.shape[:2]
    shape = (*rows, call.value_dim)
    if out.data.shape != shape or out.dtype is not call.q.dtype:
        refuse(
            "G-SHAPE",
            f"Layer {call.layer} answers O {out}, not {call.dtype} {list(shape)}.",
            layer=call.layer,
        )
    if not finite(out):
        _refuse_non_finite(call, "O", ~np.isfinite(out.to_float32()))
    if lse is None:
        return
    if lse.data.shape != rows or lse.dtype is not DType.FLOAT32:
        refuse("G-SHAPE", f"LSE is {lse}, not float32 {list(rows)}", layer=call.layer)
    if not finite(lse):
        bad = ~np.isfinite(lse.to_float32())
        bad[call.selection.counts() == 0] = False
        if bad.any():
            _refuse_non_finite(call, "LSE", bad)


def _refuse_non_finite(call: AttentionCall, name: str, bad: Array) -> None:
    row = call.rows.ids[int(np.argmax(bad.reshape(len(bad), -1).any(axis=1)))]
    place = {"request": str(row.request), "layer": call.layer, "position": row.position}
    refuse("G-NON-FINITE", f"{name} is not finite", **place)
