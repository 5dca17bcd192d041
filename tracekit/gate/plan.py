"""The joint attention plan of DeepSeek-V4: which rows one softmax reads, for C0, C4 and C128 layers alike.

A row at position t reads its window, the rows `max(0, t - W + 1) .. t`, and in a layer that compresses also
complete compressed rows: some of `0 .. (t + 1) // 4 - 1` in C4, all of `0 .. (t + 1) // 128 - 1` in C128. All
of them and the sink share one denominator; a key is its own value; the sink has no value. The plan is a copy:
what an engine does to its cache and tables afterwards does not reach it.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.gate.refusal import refuse
from tracekit.model import AttentionCall, Bits, DType, KVFamily, RowId, scale_to_bits

KINDS = {
    frozenset({KVFamily.RECENT}): "C0",
    frozenset({KVFamily.RECENT, KVFamily.C4}): "C4",
    frozenset({KVFamily.RECENT, KVFamily.C128}): "C128",
}


@dataclass(frozen=True, eq=False)
class JointPlan:
    """What one launch reads, row by row.

    Args:
        kind: `C0`, `C4` or `C128`.
        layer: 0-based.
        rows: who the T rows are, in executed order.
        window: W.
        scale_bits: binary32 bits of the factor on q.k.
        sink: FP32 `[H]`, or None.
        candidates: for each row its families in executed order, each with its row ids in executed order.
    """

    kind: str
    layer: int
    rows: tuple[RowId, ...]
    window: int
    scale_bits: int
    sink: Bits | None
    candidates: tuple[tuple[tuple[KVFamily, npt.NDArray[np.int64]], ...], ...]

    @property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of the plan: rows by identity, so their order in the batch is not in it."""
        found = hashlib.sha256(f"{self.kind} {self.layer} {self.window} {self.scale_bits}".encode())
        found.update(b"" if self.sink is None else self.sink.data.tobytes())
        for at in sorted(range(len(self.rows)), key=lambda t: self.rows[t]):
            found.update(f" {self.rows[at].request} {self.rows[at].position}".encode())
            for family, ids in self.candidates[at]:
                found.update(f" {family} {ids.size} ".encode())
                found.update(np.ascontiguousarray(ids, "<i8").tobytes())
        return found.hexdigest()


def joint_plan(call: AttentionCall) -> JointPlan:
    """Return the plan of a call.

    Raises:
        GateRefused: `G-PLAN-FAMILIES`, `G-PLAN-SHARED`, `G-PLAN-WINDOW`, `G-PLAN-ROWS`, `G-PLAN-SINK`,
            `G-PLAN-SCALE`: it is no joint attention of DeepSeek-V4.
    """
    layer, families = call.layer, call.selection.families
    kind = KINDS.get(frozenset(families))
    if kind is None:
        refuse("G-PLAN-FAMILIES", f"it reads {', '.join(families)}", layer=layer)
    window = call.conventions.window
    if window is None:
        refuse("G-PLAN-WINDOW", "the launch names no window", layer=layer)
    if not all(rows.shared for held in call.kv.values() for rows in held.values()):
        refuse("G-PLAN-SHARED", "values are not the keys", layer=layer)
    if call.sink is not None and (
        call.sink.shape != (call.num_heads,) or call.sink.dtype is not DType.FLOAT32
    ):
        refuse("G-PLAN-SINK", f"the sink is {call.sink}", layer=layer)
    if call.conventions.scale_bits != scale_to_bits(call.head_dim**-0.5):
        refuse("G-PLAN-SCALE", f"the scale is {call.conventions.scale}", layer=layer)
    candidates = []
    for t, row in enumerate(call.rows.ids):
        read = tuple((family, ids.copy()) for family, ids in call.selection.row(t))
        for family, ids in read:
            _check_row(call, row, family, ids, window)
        candidates.append(read)
    sink = None if call.sink is None else Bits(call.sink.data.copy(), call.sink.dtype)
    return JointPlan(kind, layer, call.rows.ids, window, call.conventions.scale_bits, sink, tuple(candidates))


def _check_row(
    call: AttentionCall, row: RowId, family: KVFamily, ids: npt.NDArray[np.int64], window: int
) -> None:
    place = {"request": str(row.request), "layer": call.layer, "position": row.position}
    if family is KVFamily.RECENT:
        wanted = np.arange(max(0, row.position - window + 1), row.position + 1)
        if not np.array_equal(ids, wanted):
            text = f"it reads {ids.size} rows {ids[:1].tolist()}..{ids[-1:].tolist()} of a window of {window}"
            refuse("G-PLAN-WINDOW", text, **place)
        return
    visible = family.visible(row.position)
    if ids.size and int(ids.max()) >= visible:
        refuse("G-PLAN-ROWS", f"{family} row {int(ids.max())} is not complete", **place)
    if family is KVFamily.C128 and not np.array_equal(np.sort(ids), np.arange(visible)):
        refuse("G-PLAN-ROWS", f"{ids.size} of {visible} {family} rows are read", **place)
