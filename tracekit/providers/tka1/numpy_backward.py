"""The backward of TKA-1 in numpy, one query row after the other: docs/tka1.md, S16, as it stands there.

It is the form to read, and what the C++ is compared with. Rows come request by request in the order of their
positions, so each sum over queries is a chain inside a leaf of 128 positions and a node of a tree above it.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall
from tracekit.providers.tka1 import arithmetic as ar
from tracekit.providers.tka1.gradients import Backward, FamilyGradients, Gradients
from tracekit.providers.tka1.inputs import LEAF, FamilyInput, Ranges
from tracekit.providers.tka1.numpy_form import TOP, Ends, ends, given_rows, values, whole_rows

I64 = npt.NDArray[np.int64]


@dataclass(eq=False)
class Tree:
    """The unfinished nodes of one sum, which leaves enter in ascending order (S8); a merge is one add."""

    nodes: list[tuple[int, ar.F32]] = field(default_factory=list)  # (where it meets the one below, the sum)
    last: int = 0

    def add(self, leaf: int, part: ar.F32) -> None:
        """Take in the sum of a leaf."""
        level = (self.last ^ leaf).bit_length() if self.nodes else TOP
        self._merge_below(level)
        self.nodes.append((level, part))
        self.last = leaf

    def total(self, shape: tuple[int, ...]) -> ar.F32:
        """Return the whole sum; one without terms is -0."""
        self._merge_below(TOP)
        return self.nodes[0][1] if self.nodes else np.full(shape, -0.0, np.float32)

    def _merge_below(self, level: int) -> None:
        while len(self.nodes) > 1 and self.nodes[-1][0] < level:
            _, high = self.nodes.pop()
            meets, low = self.nodes.pop()
            self.nodes.append((meets, low + high))


@dataclass(frozen=True, eq=False)
class Weights:
    """What one query row makes of the keys of one family: S16.2.

    Args:
        ids: [K], ascending.
        keys: [K, Hkv, D].
        p: [Hkv, group, K].
        g: likewise.
    """

    ids: I64
    keys: ar.F32
    p: ar.F32
    g: ar.F32


def run(backward: Backward, threads: int = 1) -> Gradients:
    """Compute the gradients of a launch.

    Args:
        backward: the launch and dO.
        threads: ignored; one thread.

    Raises:
        Unsupported: `S1-FLUSH` where the caller flushes subnormals.
    """
    del threads
    ar.require_subnormals()
    with np.errstate(all="ignore"):
        return _Run(backward).gradients()


def merge_sums(parts: Sequence[tuple[int, ar.U32]]) -> ar.U32:
    """Merge unfinished sums of disjoint aligned runs of leaves into the finished one (S16.6).

    Args:
        parts: each with its tree key, ascending: `Run.key` of the keys for dQ, the first leaf of positions
            for dK, dV and dsink.

    Raises:
        InvalidCall: `S14-OVERLAP` for keys that do not ascend.
    """
    if any(a >= b for (a, _), (b, _) in itertools.pairwise(parts)):
        raise InvalidCall(
            f"sums with the keys {[key for key, _ in parts]}; each comes once, ascending. "
            "Rule: docs/tka1.md, S14.",
            rule="S14-OVERLAP",
        )
    tree = Tree()
    with np.errstate(all="ignore"):
        for key, part in parts:
            tree.add(key, part.view(np.float32))
        return ar.one_nan(tree.total(parts[0][1].shape) + np.float32(0))


class _Run:
    def __init__(self, backward: Backward) -> None:
        self.inputs, self.positions = backward.inputs, backward.positions
        self.end_of_sum = np.float32(-0.0 if backward.unfinished else 0.0)
        inputs, heads = backward.inputs, backward.inputs.q.shape[1]
        rows = whole_rows(inputs) if backward.rows is None else given_rows(backward.rows)
        self.grouped = (inputs.kv_heads, heads // inputs.kv_heads)
        self.q = ar.widen(inputs.q, inputs.dtype)
        self.d_out = ar.widen(backward.d_out, backward.dtype)
        self.end: Ends = ends(rows, inputs.sink)
        self.delta = _chain(self.d_out, values(rows, self.end))  # S16.1
        self.live = ~(self.end.zero & ~self.end.poisoned)  # by head: only the sink differs between heads

    def gradients(self) -> Gradients:
        """All of them; each sum starts at -0 and ends with one add of +0 (S16.6)."""
        inputs = self.inputs
        d_q = np.full(inputs.q.shape, -0.0, np.float32)
        d_sink = np.full((len(inputs.families[0].keys), inputs.q.shape[1]), -0.0, np.float32)
        families: list[tuple[list[ar.U32], list[ar.U32]]] = [([], []) for _ in inputs.families]
        for request in range(len(d_sink)):
            trees = [(Tree(), Tree()) for _ in inputs.families]
            sinks = Tree()
            for leaf, rows in self._leaves(request):
                parts = self._leaf_of_queries(request, rows, d_q)
                for tree, part in zip(trees, parts, strict=True):
                    tree[0].add(leaf, part[0])
                    tree[1].add(leaf, part[1])
                sinks.add(leaf, self._sink(rows))
            d_sink[request] = sinks.total(d_sink[request].shape)
            for family, tree, to in zip(inputs.families, trees, families, strict=True):
                d_k = tree[0].total(family.keys[request].shape)
                d_v = tree[1].total(family.values[request].shape)
                shared = family.keys[request] is family.values[request]
                to[0].append(self._end(d_k + d_v if shared else d_k))
                to[1].append(to[0][-1] if shared else self._end(d_v))
        return Gradients(
            self._end(d_q),
            tuple(FamilyGradients(tuple(k), tuple(v)) for k, v in families),
            None if inputs.sink is None else self._end(d_sink),
        )

    def _leaves(self, request: int) -> Iterator[tuple[int, list[int]]]:
        """The query rows of a request by leaf of positions, ascending."""
        mine = np.flatnonzero(self.inputs.request == request)
        mine = mine[np.argsort(self.positions[mine])]
        leaf = self.positions[mine] // LEAF
        for one in np.unique(leaf):
            yield int(one), mine[leaf == one].tolist()

    def _leaf_of_queries(self, request: int, rows: list[int], d_q: ar.F32) -> list[tuple[ar.F32, ar.F32]]:
        """S16.3 of some rows into `d_q`, and the sums of S16.4 over them, by family."""
        parts = []
        for family in self.inputs.families:
            d_k = np.full(family.keys[request].shape, -0.0, np.float32)
            d_v = np.full(family.values[request].shape, -0.0, np.float32)
            for t in rows:
                weights = self._weights(family, request, t)
                d_q[t] += self._d_q(weights, t)  # families in the order of their numbers
                at = weights.ids - family.first[request]
                for h in np.flatnonzero(self.live[t]):
                    g, in_group = divmod(int(h), self.grouped[1])
                    to_k, to_v = weights.g[g, in_group, :, None], weights.p[g, in_group, :, None]
                    d_k[at, g] = ar.fma(to_k, self.q[t, h], d_k[at, g])
                    d_v[at, g] = ar.fma(to_v, self.d_out[t, h], d_v[at, g])
            parts.append((d_k, d_v))
        return parts

    def _weights(self, family: FamilyInput, request: int, t: int) -> Weights:
        """S16.2: P and g of one row, with the scores of S4 once more."""
        selection = family.selection
        if isinstance(selection, Ranges):
            ids = np.arange(selection.lo[t], max(selection.hi[t], selection.lo[t]), dtype=np.int64)
        else:
            ids = selection.ids[selection.offsets[t] : selection.offsets[t + 1]]
        at = ids - family.first[request]
        k = ar.widen(family.keys[request][at], self.inputs.dtype)
        v = ar.widen(family.values[request][at], self.inputs.dtype)
        q, d_out = (x[t].reshape(*self.grouped, 1, -1) for x in (self.q, self.d_out))
        x = _chain(q, k.swapaxes(0, 1)[:, None]) * ar.constant(self.inputs.scale_bits)
        finite = np.isfinite(x)
        p, n = ar.exp_parts(np.where(finite, x, np.float32(0)))
        top, reciprocal, delta, poisoned = (
            a[t].reshape(*self.grouped, 1)
            for a in (self.end.top, self.end.reciprocal, self.delta, self.end.poisoned)
        )
        p = np.where(finite, ar.scale_p(p, np.where(finite, n - top, 0)), np.float32(0)) * reciprocal
        d_p = _chain(d_out, v.swapaxes(0, 1)[:, None])
        g = (p * (d_p - delta)) * ar.constant(self.inputs.scale_bits)
        nan = np.float32(np.nan)
        return Weights(ids, k, np.where(poisoned, nan, p), np.where(poisoned, nan, g))

    def _d_q(self, weights: Weights, t: int) -> ar.F32:
        """S16.3: one family's sum of one row, [H, D]."""
        tree, leaf = Tree(), weights.ids // LEAF
        for one in np.unique(leaf):
            total = np.full((*self.grouped, self.q.shape[2]), -0.0, np.float32)
            for j in np.flatnonzero(leaf == one):
                total = ar.fma(weights.g[:, :, j, None], weights.keys[j][:, None], total)
            tree.add(int(one), total.reshape(self.q.shape[1:]))
        whole = tree.total(self.q.shape[1:])
        return np.where(self.live[t][:, None], whole, np.float32(-0.0))

    def _sink(self, rows: list[int]) -> ar.F32:
        """S16.5: the terms of some rows, [H]."""
        total = np.full(self.q.shape[1], -0.0, np.float32)
        plain = self.inputs.sink is None or np.isneginf(self.inputs.sink.view(np.float32))
        for t in rows:
            p = np.where(self.end.poisoned[t], np.float32(np.nan), self.end.sink[t] * self.end.reciprocal[t])
            term = ar.fma(-p, self.delta[t], total)
            total = np.where(self.live[t] & ~plain, term, total)
        return total

    def _end(self, x: ar.F32) -> ar.U32:
        """The stored bits of a sum: one add of +0 ends it (S16.6), and there is one NaN (S13)."""
        return ar.one_nan(x + self.end_of_sum)


def _chain(a: ar.F32, b: ar.F32) -> ar.F32:
    """One chain over the last axis, ascending, from +0."""
    shape = np.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    total = np.zeros(shape, np.float32)
    for x in range(a.shape[-1]):
        total = ar.fma(a[..., x], b[..., x], total)
    return total
