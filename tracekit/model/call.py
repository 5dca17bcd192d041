"""`AttentionCall`: one attention launch of one layer, in the logical words of the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from tracekit.errors import InvalidCall
from tracekit.model.bits import Array, Bits, DType
from tracekit.model.conventions import Conventions
from tracekit.model.kv import KVFamily, KVRows
from tracekit.model.launch_plan import LaunchPlan
from tracekit.model.provenance import Provenance
from tracekit.model.rows import RequestKey, Rows
from tracekit.model.selection import Lists, Ranges, Selection


class Mode(StrEnum):
    """Why the launch was made."""

    TRAINING = "training"
    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"


class Origin(StrEnum):
    """Who made an output: the engine's kernel, or tracekit from the inputs.

    A derived output is never evidence about a kernel.
    """

    EXECUTED = "executed"
    DERIVED = "derived"


@dataclass(frozen=True, eq=False)
class Output:
    """O `[T, H, Dv]` or LSE `[T, H]` with its origin."""

    bits: Bits
    origin: Origin

    def take(self, order: Array) -> "Output":
        """Return the rows in another order."""
        return Output(self.bits.take(order), self.origin)


@dataclass(frozen=True, eq=False)
class Gradients:
    """dO going in, gradients coming out; each None where it was not recorded.

    Args:
        d_out: `[T, H, Dv]`.
        d_q: `[T, H, D]`.
        d_kv: per request and family, shaped as its keys and values.
        d_sink: `[H]`.
    """

    d_out: Bits
    d_q: Bits | None = None
    d_kv: Mapping[RequestKey, Mapping[KVFamily, KVRows]] = field(default_factory=dict)
    d_sink: Bits | None = None


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention launch of one layer.

    Args:
        layer: 0-based layer.
        step: 0-based engine step (one forward of the model).
        rank: rank of the process in its group.
        mode: why it was made.
        rows: the T query rows in executed order.
        q: `[T, H, D]`, as the kernel saw it (after norm and RoPE, padded heads removed).
        kv: KV rows per request and family; every request of `rows` has every family of `selection`.
        sink: FP32 `[H]`, natural-log logit that joins the denominator only, or None.
        selection: the keys of each row, as executed.
        out: O, or None where it was not recorded.
        lse: LSE, or None where it was not recorded.
        conventions: what the numbers mean.
        provenance: which kernel ran.
        launch: the physical side, or None where the engine did not fill it.
        grads: gradients, or None.

    Raises:
        InvalidCall: `M-CALL-SHAPE`, `M-CALL-DTYPE`, `M-CALL-HEADS`, `M-CALL-KV`, `M-CALL-SINK`,
            `M-CALL-OUT`, `M-CALL-LSE`, `M-SEL-OUTSIDE`, `M-SEL-CAUSAL`, `M-LAUNCH-SLOTS`.
    """

    layer: int
    step: int
    mode: Mode
    rows: Rows
    q: Bits
    kv: Mapping[RequestKey, Mapping[KVFamily, KVRows]]
    sink: Bits | None
    selection: Selection
    conventions: Conventions
    provenance: Provenance
    out: Output | None = None
    lse: Output | None = None
    rank: int = 0
    launch: LaunchPlan | None = None
    grads: Gradients | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv", {key: dict(families) for key, families in self.kv.items()})
        _check_shapes(self)
        _check_kv(self)
        _check_selection(self)

    @property
    def num_rows(self) -> int:
        """T."""
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        """H, the query heads."""
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        """D, the width of a key."""
        return self.q.shape[2]

    @property
    def value_dim(self) -> int:
        """Dv, the width of a value."""
        return self._any_kv().value_bits.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """Hkv, the key heads; query head h reads key head `h // (H / Hkv)`."""
        return self._any_kv().keys.shape[1]

    def _any_kv(self) -> KVRows:
        return next(iter(next(iter(self.kv.values())).values()))

    @property
    def dtype(self) -> DType:
        """The dtype of Q, KV and O."""
        return self.q.dtype

    def take(self, order: Array) -> "AttentionCall":
        """Return the call with some of its rows, in another order.

        Q, selection and outputs move with the rows; KV is addressed by request and row, so it does not
        move, but requests that lose all rows are dropped. The launch plan describes the old order and is
        dropped too, and so are gradients.
        """
        order = np.asarray(order, np.int64)
        rows = self.rows.take(order)
        return replace(
            self,
            rows=rows,
            q=self.q.take(order),
            kv={key: self.kv[key] for key in rows.requests},
            selection=self.selection.take(order),
            out=None if self.out is None else self.out.take(order),
            lse=None if self.lse is None else self.lse.take(order),
            launch=None,
            grads=None,
        )

    def with_kv(self, kv: Mapping[RequestKey, Mapping[KVFamily, KVRows]]) -> "AttentionCall":
        """Return the call over other KV rows."""
        return replace(self, kv=kv, launch=None)

    def visible_kv(self) -> "AttentionCall":
        """Return the call with only the KV rows that its own rows may see: what a shorter run would hold."""
        kv: dict[RequestKey, dict[KVFamily, KVRows]] = {}
        for index, key in enumerate(self.rows.requests):
            last = int(self.rows.positions[self.rows.request == index].max())
            kv[key] = {family: rows.until(family.visible(last)) for family, rows in self.kv[key].items()}
        return self.with_kv(kv)


def _check_shapes(call: AttentionCall) -> None:
    if len(call.q.shape) != 3 or call.q.shape[0] != call.rows.count or min(call.q.shape) < 1:
        raise InvalidCall(
            f"q is [T, H, D] with T = {call.rows.count} rows, at least 1 each, not {list(call.q.shape)}.",
            rule="M-CALL-SHAPE",
        )
    if call.sink is not None and (
        call.sink.dtype is not DType.FLOAT32 or call.sink.shape != (call.num_heads,)
    ):
        raise InvalidCall(f"the sink is float32 [{call.num_heads}], not {call.sink}.", rule="M-CALL-SINK")
    if call.launch is not None and call.launch.row_slots.shape != (call.rows.count,):
        raise InvalidCall("the launch plan gives each row its slot.", rule="M-LAUNCH-SLOTS")


def _check_kv(call: AttentionCall) -> None:
    missing = [key for key in call.rows.requests if key not in call.kv]
    if missing or not call.kv:
        raise InvalidCall(
            f"request {missing[0] if missing else '?'} has query rows but no KV.", rule="M-CALL-KV"
        )
    first = call._any_kv()
    for key, families in call.kv.items():
        absent = [family for family in call.selection.families if family not in families]
        if absent:
            raise InvalidCall(f"request {key} lacks KV family {absent[0]}.", rule="M-CALL-KV")
        for family, rows in families.items():
            if rows.keys.dtype != call.q.dtype:
                raise InvalidCall(
                    f"q is {call.q.dtype} and the keys of request {key}, family {family} are "
                    f"{rows.keys.dtype}; one dtype is needed.",
                    rule="M-CALL-DTYPE",
                )
            same_heads = rows.keys.shape[1] == first.keys.shape[1]
            if rows.keys.shape[2] != call.q.shape[2] or not same_heads:
                raise InvalidCall(
                    f"keys of request {key}, family {family} are {list(rows.keys.shape)}; "
                    f"q is {list(call.q.shape)}: D and the number of KV heads must agree.",
                    rule="M-CALL-SHAPE",
                )
            if rows.value_bits.shape[2] != first.value_bits.shape[2]:
                raise InvalidCall("all values of a call have one width Dv.", rule="M-CALL-SHAPE")
    if call.num_heads % call.num_kv_heads:
        raise InvalidCall(
            f"{call.num_heads} query heads do not divide over {call.num_kv_heads} KV heads.",
            rule="M-CALL-HEADS",
        )
    expected = (call.num_rows, call.num_heads, call.value_dim)
    if call.out is not None and (call.out.bits.shape != expected or call.out.bits.dtype != call.dtype):
        raise InvalidCall(f"out is {call.dtype} {list(expected)}, not {call.out.bits}.", rule="M-CALL-OUT")
    if call.lse is not None and (
        call.lse.bits.shape != expected[:2] or call.lse.bits.dtype is not DType.FLOAT32
    ):
        raise InvalidCall(f"lse is float32 {list(expected[:2])}, not {call.lse.bits}.", rule="M-CALL-LSE")


def _check_selection(call: AttentionCall) -> None:
    """Every selected row is held, and causally visible where the call is causal."""
    if call.selection.rows != call.num_rows:
        raise InvalidCall(
            f"the selection speaks of {call.selection.rows} rows, q of {call.num_rows}.", rule="M-CALL-SHAPE"
        )
    for family, part in call.selection.families.items():
        held = [call.kv[key][family] for key in call.rows.requests]
        first = np.array([rows.first for rows in held], np.int64)[call.rows.request]
        end = np.array([rows.end for rows in held], np.int64)[call.rows.request]
        visible = (call.rows.positions + 1) // family.ratio
        lo, hi = _extent(part)
        some = hi > lo
        _refuse(
            call,
            family,
            some & ((lo < first) | (hi > end)),
            lo,
            hi,
            "M-SEL-OUTSIDE",
            "the KV rows that are held",
        )
        if call.conventions.causal:
            _refuse(call, family, some & (hi > visible), lo, hi, "M-SEL-CAUSAL", "what is causally visible")


def _extent(part: Ranges | Lists) -> tuple[Array, Array]:
    """Smallest id and largest id + 1 of each query row; (0, 0) where it reads nothing."""
    if isinstance(part, Ranges):
        return part.lo, part.hi
    counts = np.diff(part.offsets)
    lo, hi = np.zeros(part.rows, np.int64), np.zeros(part.rows, np.int64)
    some = counts > 0
    if some.any():
        starts = part.offsets[:-1][some]
        lo[some] = np.minimum.reduceat(part.ids, starts)
        hi[some] = np.maximum.reduceat(part.ids, starts) + 1
    return lo, hi


def _refuse(
    call: AttentionCall, family: KVFamily, bad: Array, lo: Array, hi: Array, rule: str, bound: str
) -> None:
    if not bad.any():
        return
    t = int(np.argmax(bad))
    row = call.rows.ids[t]
    raise InvalidCall(
        f"layer {call.layer}, request {row.request}, position {row.position}: the selection reads rows "
        f"[{int(lo[t])}, {int(hi[t])}) of family {family}, past {bound}.",
        rule=rule,
        layer=call.layer,
        request=str(row.request),
        position=row.position,
        family=family.value,
    )
