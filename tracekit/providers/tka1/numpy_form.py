"""The whole of TKA-1 in numpy: an independent reading of docs/tka1.md that opens no library.

It serves where no native library exists, with the same bits, and it is what the C++ is compared with. It is
built the other way round: the C++ walks leaves and keeps unfinished nodes; here all leaves of some query rows
are computed side by side and the tree is folded level by level.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.model.bits import DType
from tracekit.providers.tka1 import arithmetic as ar
from tracekit.providers.tka1.inputs import LEAF, FamilyInput, Inputs, Lists, Outputs, Partials, Ranges, Words

I64 = npt.NDArray[np.int64]
TOP = 33
"""A level above every merge."""

BUDGET = 2**17
"""(key, head) pairs that are computed side by side: temporaries stay near 1 MB."""


@dataclass(frozen=True, eq=False)
class Nodes:
    """Nodes of the trees of some rows: acc [n, H, Dv], l [n, H], m [n, H]; (row, index) [n], ascending."""

    row: I64
    index: I64
    acc: ar.F32
    l: ar.F32  # noqa: E741 - the name in the specification
    m: ar.I32

    def at(self, which: npt.NDArray[np.intp]) -> "Nodes":
        """Return some of the nodes."""
        return Nodes(self.row[which], self.index[which], self.acc[which], self.l[which], self.m[which])


def run(inputs: Inputs, threads: int = 1) -> Outputs:
    """Compute a launch.

    Args:
        inputs: the launch.
        threads: ignored; one thread.

    Raises:
        Unsupported: `S1-FLUSH` where the caller flushes subnormals.
    """
    del threads
    with np.errstate(all="ignore"):
        return _finish(whole_rows(inputs), inputs.sink, inputs.dtype)


def training(inputs: Inputs, threads: int = 1) -> tuple[Outputs, Partials]:
    """Compute a launch and keep its rows before S10; arguments and errors as `run`."""
    return run(inputs, threads), partials(inputs, threads)


def partials(inputs: Inputs, threads: int = 1) -> Partials:
    """Compute the rows before S10; arguments and errors as `run`."""
    del threads
    with np.errstate(all="ignore"):
        return _stored(whole_rows(inputs))


def merge(
    parts: Sequence[tuple[int, Partials]], sink: ar.U32 | None, dtype: DType, *, left_fold: bool = False
) -> Outputs:
    """Merge the partials of disjoint aligned runs, given with their tree keys, ascending (S14).

    `left_fold` takes the keys one after the other instead: the reduction of other kernels, not that of TKA-1.

    Raises:
        Unsupported: `S1-FLUSH` where the caller flushes subnormals.
    """
    ar.require_subnormals()
    with np.errstate(all="ignore"):
        return _finish(_merged(parts, left_fold), sink, dtype)


def merge_rows(parts: Sequence[tuple[int, Partials]]) -> Partials:
    """Merge partials as `merge`, and stop before S10: what owners of some keys need for a backward."""
    ar.require_subnormals()
    with np.errstate(all="ignore"):
        return _stored(_merged(parts, left_fold=False))


def _merged(parts: Sequence[tuple[int, Partials]], left_fold: bool) -> Nodes:
    stack: list[tuple[int, Nodes]] = []  # (the level where the node meets the one below it, the node)
    for at, (key, part) in enumerate(parts):
        level = (parts[at - 1][0] ^ key).bit_length() if at else TOP
        _merge_below(TOP if left_fold else level, stack)
        stack.append((level, given_rows(part)))
    _merge_below(TOP, stack)
    return stack[0][1]


def _stored(rows: Nodes) -> Partials:
    """S14: a poisoned row stores NaN in l and in all of acc."""
    poisoned = np.isnan(rows.l)[..., None]
    return Partials(np.where(poisoned, np.uint32(ar.NAN), ar.one_nan(rows.acc)), ar.one_nan(rows.l), rows.m)


def given_rows(part: Partials) -> Nodes:
    """Return partials of one run as nodes."""
    where = np.zeros(len(part.l), np.int64)
    return Nodes(where, where, part.acc.view(np.float32), part.l.view(np.float32), part.m)


def _merge_below(level: int, stack: list[tuple[int, Nodes]]) -> None:
    while len(stack) > 1 and stack[-1][0] < level:
        _, high = stack.pop()
        meets, low = stack.pop()
        stack.append((meets, _merge(low, high)))


def whole_rows(inputs: Inputs) -> Nodes:
    """The partial of every query row, families merged in the order of their numbers (S9)."""
    ar.require_subnormals()
    total = _empty(inputs)
    for number, family in enumerate(inputs.families):
        whole = _empty(inputs)
        for rows in _chunks(inputs, family):
            nodes = _tree(_leaves(inputs, family, rows))
            whole.acc[nodes.row], whole.l[nodes.row], whole.m[nodes.row] = nodes.acc, nodes.l, nodes.m
        total = whole if number == 0 else _merge(total, whole)
    return total


def _empty(inputs: Inputs) -> Nodes:
    """The empty partial (-0, +0, EMPTY) in every row (S6.4)."""
    rows, heads, _ = inputs.q.shape
    return Nodes(
        np.arange(rows),
        np.zeros(rows, np.int64),
        np.full((rows, heads, inputs.value_dim), -0.0, np.float32),
        np.zeros((rows, heads), np.float32),
        np.full((rows, heads), ar.EMPTY, np.int32),
    )


def _counts(selection: Ranges | Lists) -> I64:
    if isinstance(selection, Lists):
        return np.diff(selection.offsets)
    counts: I64 = np.maximum(selection.hi - selection.lo, 0)
    return counts


def _chunks(inputs: Inputs, family: FamilyInput) -> Iterator[I64]:
    """Rows of one request with some keys, as many as the budget allows, at least one."""
    counts = _counts(family.selection)
    for request in np.unique(inputs.request):
        rows = np.flatnonzero((inputs.request == request) & (counts > 0))
        group = np.cumsum(counts[rows]) * inputs.q.shape[1] // BUDGET
        yield from np.split(rows, np.flatnonzero(np.diff(group)) + 1) if rows.size else ()


def _keys(family: FamilyInput, rows: I64) -> tuple[I64, I64]:
    """(query row, row id) of every key of some rows, ids ascending inside a row."""
    selection = family.selection
    if isinstance(selection, Lists):
        start, end = selection.offsets[rows], selection.offsets[rows + 1]
    else:
        start, end = selection.lo[rows], selection.hi[rows]
    counts = end - start
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - start, counts)
    return np.repeat(rows, counts), selection.ids[place] if isinstance(selection, Lists) else place


def _leaves(inputs: Inputs, family: FamilyInput, rows: I64) -> Nodes:
    """S4 to S6 for every non-empty leaf of some rows of one request; leaves stand side by side."""
    row, ids = _keys(family, rows)
    leaf = ids // LEAF
    starts = np.flatnonzero(np.concatenate([[True], (row[1:] != row[:-1]) | (leaf[1:] != leaf[:-1])]))
    lengths = np.diff(np.concatenate([starts, [ids.size]]))
    order = np.argsort(-lengths, kind="stable")  # long leaves first: step j touches the first few only
    starts, lengths = starts[order], lengths[order]
    slot = np.arange(lengths[0])
    exists = slot < lengths[:, None]
    request = int(inputs.request[rows[0]])
    place = (
        ids[np.where(exists, starts[:, None] + slot, starts[:, None])] - family.first[request]
    )  # [n, keys]
    kv_heads = inputs.kv_heads
    q = ar.widen(inputs.q[row[starts]], inputs.dtype).reshape(len(starts), kv_heads, -1, 1, inputs.q.shape[2])
    scores = _scores(q, family.keys[request], place, inputs.dtype)  # [n, Hkv, group, keys]
    x = scores * ar.constant(inputs.scale_bits)

    finite = np.isfinite(x) & exists[:, None, None]
    poisoned = ((np.isnan(x) | (x == np.inf)) & exists[:, None, None]).any(-1)
    p, n = ar.exp_parts(np.where(finite, x, np.float32(0)))
    m = np.where(finite, n, ar.EMPTY).max(-1).astype(np.int32)
    p = np.where(finite, ar.scale_p(p, n - np.where(finite.any(-1), m, 0)[..., None]), np.float32(0))
    acc, l = _sums(p, family.values[request], place, lengths, inputs.dtype)  # noqa: E741
    empty = m == ar.EMPTY
    acc[empty] = -0.0
    l[empty] = 0.0
    l[poisoned] = np.nan

    heads = inputs.q.shape[1]
    nodes = Nodes(
        row[starts],
        leaf[starts],
        acc.reshape(len(starts), heads, -1),
        l.reshape(len(starts), heads),
        m.reshape(len(starts), heads),
    )
    return nodes.at(np.argsort(order))


def _scores(q: ar.F32, keys: Words, place: I64, dtype: DType) -> ar.F32:
    """S4: a chain a score, d ascending. q [n, Hkv, group, 1, D], place [n, keys] -> [n, Hkv, group, keys]."""
    by_d = np.ascontiguousarray(np.moveaxis(q, -1, 0), np.float64)
    k = ar.widen(keys[place], dtype).transpose(3, 0, 2, 1)[:, :, :, None]  # [D, n, Hkv, 1, keys]
    k = np.ascontiguousarray(k, np.float64)
    s = np.zeros((*q.shape[:3], place.shape[1]), np.float32)
    for q_d, k_d in zip(by_d, k, strict=True):
        s = ar.add_once(q_d * k_d, s)
    return s


def _sums(p: ar.F32, values: Words, place: I64, lengths: I64, dtype: DType) -> tuple[ar.F32, ar.F32]:
    """S6.3: acc [n, Hkv, group, Dv] and l [n, Hkv, group], one chain each, keys ascending."""
    acc = np.zeros((*p.shape[:3], values.shape[2]), np.float32)
    l = np.zeros(p.shape[:3], np.float32)  # noqa: E741
    for j in range(p.shape[3]):
        n = int(np.count_nonzero(lengths > j))
        l[:n] += p[:n, :, :, j]
        v = ar.widen(values[place[:n, j]], dtype).astype(np.float64)[:, :, None]
        acc[:n] = ar.add_once(p[:n, :, :, j, None].astype(np.float64) * v, acc[:n])
    return acc, l


def _merge(a: Nodes, b: Nodes) -> Nodes:
    """S7, node by node; row and index are those of the parent."""
    m = np.maximum(a.m, b.m)
    fa, fb = ar.pow2(a.m - m), ar.pow2(b.m - m)
    acc = ar.fma(a.acc, fa[..., None], b.acc * fb[..., None])
    return Nodes(a.row, a.index >> 1, acc, ar.fma(a.l, fa, b.l * fb), m)


def _tree(nodes: Nodes) -> Nodes:
    """S8: fold the aligned binary tree, level by level, until each row has one node."""
    while nodes.index.any():
        parent = nodes.index >> 1
        pair = np.flatnonzero((nodes.row[1:] == nodes.row[:-1]) & (parent[1:] == parent[:-1]))
        merged = _merge(nodes.at(pair), nodes.at(pair + 1))
        for into, value in ((nodes.acc, merged.acc), (nodes.l, merged.l), (nodes.m, merged.m)):
            into[pair] = value
        stays = np.setdiff1d(np.arange(len(parent)), pair + 1, assume_unique=True)
        nodes = Nodes(nodes.row, parent, nodes.acc, nodes.l, nodes.m).at(stays)
    return nodes


@dataclass(frozen=True, eq=False)
class Ends:
    """What S10 makes of rows before the division, each [T, H].

    Args:
        top: Md.
        factor: f.
        reciprocal: 1 / ld.
        sink: p * 2^(n - Md) of the sink, +0 without one.
        lse: without the sink.
        lse_with_sink: with it.
        poisoned: rows of S10.1.
        zero: rows of S10.2 and S10.3.
    """

    top: ar.I32
    factor: ar.F32
    reciprocal: ar.F32
    sink: ar.F32
    lse: ar.F32
    lse_with_sink: ar.F32
    poisoned: npt.NDArray[np.bool_]
    zero: npt.NDArray[np.bool_]


def ends(rows: Nodes, sink_bits: ar.U32 | None) -> Ends:
    """S10 and S12: the sink, the denominator and both LSE values."""
    sink = np.full(rows.l.shape, -np.inf, np.float32)
    if sink_bits is not None:
        sink[:] = sink_bits.view(np.float32)
    empty = rows.m == ar.EMPTY
    m = np.where(empty, 0, rows.m).astype(np.int32)
    l = np.where(empty | np.isnan(rows.l), np.float32(1), rows.l)  # noqa: E741
    lse = np.where(empty, np.float32(-np.inf), ar.log_parts(l, m))

    p, n = ar.exp_parts(np.where(np.isfinite(sink), sink, np.float32(0)))
    plain = np.isneginf(sink)  # S10.4
    top = np.where(plain, m, np.maximum(m, n)).astype(np.int32)
    factor = ar.pow2(m - top)
    weight = np.where(plain, np.float32(0), p * ar.pow2(np.where(plain, 0, n - top).astype(np.int32)))
    denominator = np.where(plain, l, ar.fma(l, factor, weight))
    lse_with_sink = np.where(plain, lse, ar.log_parts(denominator, top))
    lse_with_sink = np.where(empty, sink, lse_with_sink)  # S10.3
    lse_with_sink = np.where(np.isposinf(sink), sink, lse_with_sink)  # S10.2
    return Ends(
        top,
        factor,
        ar.reciprocal(denominator),
        weight,
        lse,
        lse_with_sink,
        np.isnan(rows.l) | np.isnan(sink),
        empty | np.isposinf(sink),
    )


def values(rows: Nodes, end: Ends) -> ar.F32:
    """S11 before its rounding: O [T, H, Dv]."""
    value = (rows.acc * end.factor[..., None]) * end.reciprocal[..., None]
    value = np.where(end.zero[..., None], np.float32(0), value)
    return np.where(end.poisoned[..., None], np.float32(np.nan), value)


def _finish(rows: Nodes, sink_bits: ar.U32 | None, dtype: DType) -> Outputs:
    """S10 to S13."""
    end = ends(rows, sink_bits)
    return Outputs(
        ar.narrow(values(rows, end), dtype),
        np.where(end.poisoned, np.uint32(ar.NAN), end.lse.view(np.uint32)),
        np.where(end.poisoned, np.uint32(ar.NAN), end.lse_with_sink.view(np.uint32)),
    )
