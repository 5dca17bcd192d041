"""An untested engine has to show its conventions before it is recorded: one row a layer, again in binary64.

Every recording is held against its conventions when it ends. A version outside the tested window is also
asked at the first launch of each layer, because where scale, window, sink or the order of the cache mean
something else, nothing that is read of it can be trusted.
"""

import numpy as np
import numpy.typing as npt

from tracekit.errors import ConventionContradicted
from tracekit.model import Array, Bits, DType
from tracekit.recorder.observation import Observation, SeenKV

_SLACK = 16.0
"""Times u * sum of p|v|: wide enough for a kernel that rounds scores, P and O to the dtype of the model, and
far below what a wrong scale, sink, window or row order changes."""


def check_conventions(seen: Observation, engine: str = "vLLM", rule: str = "V-CONTRADICTED") -> None:
    """Compute the last row of a launch again; it has the most keys of its request.

    Args:
        seen: the launch.
        engine: whose it is, for the message.
        rule: of the error.

    Raises:
        ConventionContradicted: the rule, naming the readings that would fit where there are some.
    """
    if seen.out is None:
        return
    wanted, bound = _row(seen, sink=True, window=True, scale=1.0)
    found = seen.out.bits.part(slice(-1, None)).to_float64()[0]
    if _inside(wanted, found, bound):
        return
    readings = {
        "without the sink": _row(seen, sink=False, window=True, scale=1.0),
        "without the window": _row(seen, sink=True, window=False, scale=1.0),
        "with scores in base 2": _row(seen, sink=True, window=True, scale=float(np.log(2.0))),
    }
    fitting = [name for name, (values, slack) in readings.items() if _inside(values, found, slack)]
    error = float(np.abs(wanted - found).max())
    raise ConventionContradicted(
        f"the last row of layer {seen.layer} differs by {error:.3g} from its conventions "
        f"({'it fits ' + ' or '.join(fitting) if fitting else 'and fits no other reading'}); this {engine} "
        "is not what the recorder was made for. Install a tested version (docs/engines.md).",
        rule=rule,
        layer=seen.layer,
        error=error,
        fitting=fitting,
    )


def _row(
    seen: Observation, *, sink: bool, window: bool, scale: float
) -> tuple[npt.NDArray[np.float64], float]:
    """O of the last row, `[H, Dv]`, and how far a kernel may be from it."""
    held = seen.kv[seen.requests[int(seen.request[-1])]]
    q = seen.q.part(slice(-1, None)).to_float64()[0]
    dtype = seen.q.dtype
    parts = [(held[family], ids) for family, ids in seen.selection.row(seen.positions.size - 1)]
    if not window:
        parts[0] = (parts[0][0], np.arange(parts[0][0].first, int(parts[0][1].max()) + 1))
    keys, values = (
        np.concatenate([_values(rows.parts[side], rows, ids, dtype) for rows, ids in parts], axis=1)
        for side in (0, -1)
    )
    repeat = q.shape[0] // keys.shape[0]
    keys, values = keys.repeat(repeat, axis=0), values.repeat(repeat, axis=0)
    scores = np.einsum("hd,hnd->hn", q, keys) * seen.conventions.scale * scale
    extra = np.full(q.shape[0], -np.inf)
    if sink and seen.sink is not None:
        extra = seen.sink.to_float64()
    peak = np.maximum(scores.max(axis=1), extra)
    weights = np.exp(scores - peak[:, None])
    weights /= (weights.sum(axis=1) + np.exp(extra - peak))[:, None]
    size = float(np.einsum("hn,hnd->hd", weights, np.abs(values)).max())
    return np.einsum("hn,hnd->hd", weights, values), _SLACK * dtype.unit_roundoff * max(size, 1e-30)


def _values(data: Array, rows: SeenKV, ids: npt.NDArray[np.int64], dtype: DType) -> npt.NDArray[np.float64]:
    """`[Hkv, n, D]`, the values of some rows."""
    return Bits(np.ascontiguousarray(data[:, ids - rows.first]), dtype).to_float64()


def _inside(wanted: npt.NDArray[np.float64], found: npt.NDArray[np.float64], bound: float) -> bool:
    return bool((np.abs(wanted - found) <= bound).all())
