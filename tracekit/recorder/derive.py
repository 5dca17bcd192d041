"""The LSE of a call whose kernel gave none, computed by tracekit: derived, never evidence about a kernel."""

import numpy as np
import numpy.typing as npt

from tracekit.model import AttentionCall, Bits, DType
from tracekit.providers.base import Launch
from tracekit.providers.portable import Tka1

_ROWS = 64
"""Query rows at a time: bounds the memory of one score matrix."""


def derive_lse(call: AttentionCall) -> Bits:
    """Return FP32 `[T, H]`: ln of the sum of exp(scale q.k) over the selected keys.

    Natural logarithm, the sink not counted, -inf for a row without keys. By TKA-1 where it takes the call
    (bf16), so that the derived bits are the same on every machine; else in binary64, rounded once.
    """
    kernel = Tka1()
    if kernel.refuses(call) is None:
        answer = kernel.run(Launch((call,))).tensors[0].lse
        if answer is not None:
            return answer
    return lse_in_binary64(call)


def lse_in_binary64(call: AttentionCall) -> Bits:
    """Return the LSE of `derive_lse` for any dtype, by numpy."""
    lse = np.full((call.num_rows, call.num_heads), -np.inf)
    group = call.num_heads // call.num_kv_heads
    for index, key in enumerate(call.rows.requests):
        mine = np.flatnonzero(call.rows.request == index)
        for family, part in call.selection.families.items():
            held = call.kv[key][family]
            keys = held.keys.to_float64().transpose(1, 2, 0)
            for start in range(0, mine.size, _ROWS):
                rows = mine[start : start + _ROWS]
                q = call.q.take(rows).to_float64().reshape(rows.size, -1, group, call.head_dim)
                scores = np.einsum("tkgd,kdn->tkgn", q, keys, optimize=True) * call.conventions.scale
                seen = np.zeros((rows.size, held.count), np.bool_)
                for i, t in enumerate(rows):
                    seen[i, part.row(int(t)) - held.first] = True
                scores[np.broadcast_to(~seen[:, None, None, :], scores.shape)] = -np.inf
                lse[rows] = np.logaddexp(lse[rows], _log_sum_exp(scores).reshape(rows.size, -1))
    return Bits.from_float32(lse.astype(np.float32), DType.FLOAT32)


def _log_sum_exp(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    peak = scores.max(axis=-1, initial=-np.inf)
    shift = np.where(np.isfinite(peak), peak, 0.0)
    with np.errstate(divide="ignore"):
        lse: npt.NDArray[np.float64] = np.log(np.exp(scores - shift[..., None]).sum(-1)) + shift
    return lse
