"""The rules of an `AttentionCall` that no noun inside it can check alone."""

from typing import TYPE_CHECKING

import numpy as np

from tracekit.errors import InvalidCall
from tracekit.model.bits import Array, Bits, DType
from tracekit.model.kv import KVFamily
from tracekit.model.selection import Lists, Ranges

if TYPE_CHECKING:
    from tracekit.model.call import AttentionCall


def check_call(call: "AttentionCall") -> None:
    """Check everything that no noun can check alone.

    Raises:
        InvalidCall: `M-CALL-NUMBER`, `M-CALL-SHAPE`, `M-CALL-DTYPE`, `M-CALL-HEADS`, `M-CALL-KV`,
            `M-CALL-SINK`, `M-CALL-OUT`, `M-CALL-LSE`, `M-CALL-GRADS`, `M-SEL-OUTSIDE`, `M-SEL-CAUSAL`,
            `M-SEL-WINDOW`, `M-LAUNCH-SLOTS`, `M-LAUNCH-PAGES`, `M-LAUNCH-SEQUENCES`.
    """
    _check_numbers(call)
    _check_shapes(call)
    _check_launch(call)
    _check_kv(call)
    _check_outputs(call)
    _check_gradients(call)
    _check_selection(call)


def _check_numbers(call: "AttentionCall") -> None:
    for name in ("layer", "step", "rank"):
        number = getattr(call, name)
        if number < 0:
            raise InvalidCall(
                f"{name} {number} is below 0; {name}s are counted from 0.",
                rule="M-CALL-NUMBER",
                number=number,
            )


def _check_shapes(call: "AttentionCall") -> None:
    if len(call.q.shape) != 3 or call.q.shape[0] != call.rows.count or min(call.q.shape) < 1:
        raise InvalidCall(
            f"q is [T, H, D] with T = {call.rows.count} rows, at least 1 each, not {list(call.q.shape)}.",
            rule="M-CALL-SHAPE",
        )
    if call.sink is not None and (
        call.sink.dtype is not DType.FLOAT32 or call.sink.shape != (call.num_heads,)
    ):
        raise InvalidCall(f"the sink is float32 [{call.num_heads}], not {call.sink}.", rule="M-CALL-SINK")


def _check_launch(call: "AttentionCall") -> None:
    plan, requests = call.launch, len(call.rows.requests)
    if plan is None:
        return
    if plan.row_slots.shape != (call.rows.count,):
        raise InvalidCall(
            f"the launch plan gives each of {call.rows.count} rows its slot, not {plan.row_slots.size}.",
            rule="M-LAUNCH-SLOTS",
        )
    if plan.block_tables and len(plan.block_tables) != requests:
        raise InvalidCall(
            f"the launch plan has {len(plan.block_tables)} block tables for {requests} requests; "
            "give each one, or none.",
            rule="M-LAUNCH-PAGES",
        )
    if plan.cu_seqlens is not None and plan.cu_seqlens.size != requests + 1:
        raise InvalidCall(
            f"cu_seqlens of {requests} requests has {requests + 1} starts, not {plan.cu_seqlens.size}.",
            rule="M-LAUNCH-SEQUENCES",
        )


def _check_kv(call: "AttentionCall") -> None:
    missing = [key for key in call.rows.requests if key not in call.kv]
    if missing or not call.kv:
        raise InvalidCall(
            f"request {missing[0] if missing else '?'} has query rows but no KV.", rule="M-CALL-KV"
        )
    first = call.any_kv
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


def _check_outputs(call: "AttentionCall") -> None:
    expected = (call.num_rows, call.num_heads, call.value_dim)
    if call.out is not None and (call.out.bits.shape != expected or call.out.bits.dtype != call.dtype):
        raise InvalidCall(f"out is {call.dtype} {list(expected)}, not {call.out.bits}.", rule="M-CALL-OUT")
    if call.lse is not None and (
        call.lse.bits.shape != expected[:2] or call.lse.bits.dtype is not DType.FLOAT32
    ):
        raise InvalidCall(f"lse is float32 {list(expected[:2])}, not {call.lse.bits}.", rule="M-CALL-LSE")


def _check_gradients(call: "AttentionCall") -> None:
    grads = call.grads
    if grads is None:
        return
    shape = (call.num_rows, call.num_heads)
    _gradient("d_out", grads.d_out, (*shape, call.value_dim))
    if grads.d_q is not None:
        _gradient("d_q", grads.d_q, (*shape, call.head_dim))
    if grads.d_sink is not None:
        _gradient("d_sink", grads.d_sink, shape[1:], (DType.FLOAT32,))
    for key, families in grads.d_kv.items():
        for family, rows in families.items():
            name, read = f"d_kv of request {key}, family {family}", call.kv.get(key, {}).get(family)
            if read is None or rows.first != read.first:
                raise InvalidCall(
                    f"{name} is of rows that the call does not read; give the gradients of its own KV.",
                    rule="M-CALL-GRADS",
                )
            _gradient(f"{name} (keys)", rows.keys, read.keys.shape)
            _gradient(f"{name} (values)", rows.value_bits, read.value_bits.shape)


_GRADIENTS = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)


def _gradient(name: str, bits: Bits, shape: tuple[int, ...], dtypes: tuple[DType, ...] = _GRADIENTS) -> None:
    if bits.shape != shape or bits.dtype not in dtypes:
        raise InvalidCall(
            f"{name} is {' or '.join(dtypes)} {list(shape)}, as what it belongs to, not {bits}.",
            rule="M-CALL-GRADS",
        )


def _check_selection(call: "AttentionCall") -> None:
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
        window = call.conventions.window
        if window is not None and family in (KVFamily.DENSE, KVFamily.RECENT):
            start = call.rows.positions - window + 1
            bound = f"the window of {window} rows that the call declares"
            _refuse(call, family, some & (lo < start), lo, hi, "M-SEL-WINDOW", bound)


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
    call: "AttentionCall", family: KVFamily, bad: Array, lo: Array, hi: Array, rule: str, bound: str
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
