"""Sound and unsound attention in numpy, rounding where real kernels round; for tests of the envelope."""

import numpy as np

from tracekit.model import AttentionCall, Bits, DType
from tracekit.providers.base import Tensors


def rounded(x: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is DType.FLOAT32:
        return x.astype(np.float32)
    return Bits.from_float32(x.astype(np.float32), dtype).to_float32()


def attention(
    call: AttentionCall,
    *,
    score: DType = DType.FLOAT32,
    probability: DType = DType.FLOAT32,
    tile: int | None = None,
) -> Tensors:
    """Attention in binary32, one row at a time: eager (no tile) or flash (running maximum over tiles).

    Args:
        call: the call.
        score: dtype in which scaled scores, and scores below the maximum, are held.
        probability: dtype of P when it meets V.
        tile: keys of a tile of the flash form.
    """
    out = np.zeros((call.num_rows, call.num_heads, call.value_dim), np.float32)
    lse = np.full((call.num_rows, call.num_heads), -np.inf, np.float32)
    scale = np.float32(call.conventions.scale)
    group = call.num_heads // call.num_kv_heads
    for t in range(call.num_rows):
        families = call.kv[call.rows.ids[t].request]
        parts = [(families[family], ids) for family, ids in call.selection.row(t)]
        keys = np.concatenate([kv.keys.to_float32()[ids - kv.first] for kv, ids in parts])
        values = np.concatenate([kv.value_bits.to_float32()[ids - kv.first] for kv, ids in parts])
        for h in range(call.num_heads):
            if not len(keys):
                continue
            q = call.q.to_float32()[t, h]
            x = rounded(rounded(keys[:, h // group] @ q, score) * scale, score)
            sink = -np.inf if call.sink is None else call.sink.to_float32()[h]
            v = values[:, h // group]
            form = (
                _eager(x, v, sink, score, probability)
                if tile is None
                else _flash(x, v, sink, probability, tile)
            )
            out[t, h], lse[t, h] = form
    return Tensors(Bits.from_float32(out, call.dtype), Bits.from_float32(lse, DType.FLOAT32))


def _eager(x, v, sink, score, probability):
    top = max(x.max(), sink)
    weights = np.exp(rounded(x - top, score)).astype(np.float32)
    total = weights.sum(dtype=np.float32)
    p = rounded(weights / (total + np.exp(np.float32(sink - top))), probability)
    return p @ v, top + np.log(total)


def _flash(x, v, sink, probability, tile):
    top, total, acc = np.float32(-np.inf), np.float32(0), np.zeros(v.shape[1], np.float32)
    for start in range(0, len(x), tile):
        part = x[start : start + tile]
        higher = max(top, part.max())
        weights = np.exp(part - higher).astype(np.float32)
        factor = np.exp(np.float32(top - higher))
        total = total * factor + weights.sum(dtype=np.float32)
        acc = acc * factor + rounded(weights, probability) @ v[start : start + tile]
        top = higher
    with np.errstate(over="ignore"):
        return acc / (total + np.exp(np.float32(sink - top))), top + np.log(total)
