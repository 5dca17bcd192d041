"""Whether an answer is one: shape, dtype, and numbers that are finite, read from the bits."""

import numpy as np

from tracekit.gate.refusal import refuse
from tracekit.model import Array, AttentionCall, Bits, DType
from tracekit.providers.base import Tensors

_INFINITY = {DType.BFLOAT16: (0x7F80, 0xFF80), DType.FLOAT16: (0x7C00, 0xFC00)}
"""The patterns of +inf and -inf: as signed numbers NaNs and infinities above zero are the largest, as
unsigned ones those below zero are. Two maxima need no memory, a mask would."""

_max = np.maximum.reduce
"""What `array.max()` calls in the end; on the small answers of a decode the way there costs as much again."""
_FLOAT32 = DType.FLOAT32
_INT16 = np.dtype(np.int16)


def finite(bits: Bits) -> bool:
    """Whether no element is a NaN or an infinity."""
    data, dtype = bits.data, bits.dtype
    if dtype is _FLOAT32:
        # A search of bytes takes half of what `all` does; each of them is one element.
        return b"\0" not in np.isfinite(data.view(np.float32)).tobytes()
    if dtype not in _INFINITY:
        return bool(np.isfinite(bits.to_float32()).all())
    above, below = _INFINITY[dtype]
    if not data.size:
        return True
    flat = data.ravel()  # of one axis a maximum is found faster; bits are contiguous, and nothing is copied
    return bool(_max(flat) < below and _max(flat.view(_INT16)) < above)


def check_answer(call: AttentionCall, answer: Tensors) -> None:
    """Refuse an answer that cannot be one. The LSE of a row without keys may be anything.

    Raises:
        GateRefused: `G-SHAPE`, `G-NON-FINITE`.
    """
    out, lse, q = answer.out, answer.lse, call.q
    shape, rows = out.data.shape, q.data.shape[:2]
    if len(shape) != 3 or shape[:2] != rows or shape[2] != call.value_dim or out.dtype is not q.dtype:
        wanted = [*rows, call.value_dim]
        refuse("G-SHAPE", f"it answers O {out}, not {call.dtype} {wanted}", layer=call.layer)
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
