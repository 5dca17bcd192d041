"""A launch of the C++ form over buffers that stay where they are, so that it can be captured.

Keys and values of all requests lie in one arena a family, as pages do in an engine's cache: where a request
begins in it is part of the tables, which are written anew for each call.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.errors import Unsupported
from tracekit.model import Array
from tracekit.model.bits import DType
from tracekit.providers.graphs.host import launch
from tracekit.providers.graphs.pool import HostPool
from tracekit.providers.placement import Fill
from tracekit.providers.tka1.abi import Args, Family
from tracekit.providers.tka1.inputs import DTYPES, FamilyInput, Inputs, Lists, Outputs
from tracekit.providers.tka1.native import Library

_ROW = 3
"""Words of a `tk_rows`: two pointers and the id of the first row."""


@dataclass
class FamilyBuffers:
    """What a launch reads of one family.

    Args:
        keys: bits `[room, Hkv, D]`, the rows of all requests; around them is room of `margin` rows.
        values: bits `[room, Hkv, Dv]`; the same array as `keys` where they are shared.
        table: int64 `[requests, 3]`, `tk_rows`.
        bounds: of ranges: lo and hi, int64 `[T]`; of lists: ids, int64 `[most]`, and offsets, `[T + 1]`.
        lists: whether `bounds` are those of lists.
        margin: rows before the first. A plan of another call then reads wrong rows, and no foreign memory.
    """

    keys: Array
    values: Array
    table: Array
    bounds: tuple[Array, Array]
    lists: bool
    margin: int

    @classmethod
    def of(cls, families: Sequence[FamilyInput], pool: HostPool) -> "FamilyBuffers":
        """Return buffers with room for the same family of several launches."""
        one = families[0]
        lists = isinstance(one.selection, Lists)
        shared = all(k is v for f in families for k, v in zip(f.keys, f.values, strict=True))
        margin = max(first + len(k) for f in families for first, k in zip(f.first, f.keys, strict=True))
        room = 2 * margin + max(sum(map(len, f.keys)) for f in families)
        keys = pool.empty((room, *one.keys[0].shape[1:]), one.keys[0].dtype)
        values = keys if shared else pool.empty((room, *one.values[0].shape[1:]), one.values[0].dtype)
        requests = max(len(f.keys) for f in families)
        sizes = [[array.size for array in _bounds(f)] for f in families]
        first, second = (pool.empty((max(1, *of),), np.int64) for of in zip(*sizes, strict=True))
        table = pool.empty((requests, _ROW), np.int64)
        return cls(keys, values, table, (first, second), lists, margin)

    def load(self, family: FamilyInput, fill: int) -> None:
        """Write the rows, tables and selection of a call."""
        self.keys.fill(fill)
        self.values.fill(fill)
        self.table.fill(0)
        at = self.margin
        for request, (k, v, first) in enumerate(zip(family.keys, family.values, family.first, strict=True)):
            self.keys[at : at + len(k)] = k
            if self.values is not self.keys:
                self.values[at : at + len(v)] = v
            self.table[request] = _address(self.keys, at), _address(self.values, at), first
            at += len(k)
        for to, array in zip(self.bounds, _bounds(family), strict=True):
            to[: array.size] = array

    def arguments(self) -> Family:
        """Return the block of addresses."""
        table, first, second = (array.ctypes.data for array in (self.table, *self.bounds))
        if self.lists:
            return Family(requests=table, ids=first, offsets=second)
        return Family(requests=table, lo=first, hi=second)


class StaticLaunch:
    """One launch of a library, with room for several launches of the same rows, heads and families.

    Args:
        library: the build.
        launches: those that it must have room for.
        threads: of the kernel.
        pool: gives the buffers.

    Raises:
        Unsupported: `P-GRAPH`, they differ in what is passed by value.
    """

    def __init__(self, library: Library, launches: Sequence[Inputs], threads: int, pool: HostPool) -> None:
        if len({_by_value(inputs) for inputs in launches}) != 1:
            raise Unsupported(
                "a captured launch keeps its rows, heads, families, dtype and scale; these calls differ.",
                rule="P-GRAPH",
            )
        one = launches[0]
        rows, heads, _ = one.q.shape
        self.library, self.threads, self.dtype, self.pool = library, max(1, threads), one.dtype, pool
        self.q = pool.empty(one.q.shape, one.q.dtype)
        self.request = pool.empty((rows,), np.int32)
        self.sink = None if one.sink is None else pool.empty((heads,), np.uint32)
        self.families = [
            FamilyBuffers.of([inputs.families[i] for inputs in launches], pool)
            for i in range(len(one.families))
        ]
        self.out = Outputs(
            pool.empty((rows, heads, one.value_dim), one.dtype.container),
            pool.empty((rows, heads), np.uint32),
            pool.empty((rows, heads), np.uint32),
        )
        self.rows, self.kv_heads, self.scale_bits = rows, one.kv_heads, one.scale_bits
        self._loaded: list[tuple[str, Array, Array]] = []

    @property
    def inputs(self) -> list[tuple[str, Array]]:
        """The buffers that a launch reads, by name."""
        named = [("Q", self.q), ("the requests of rows", self.request)]
        named += [] if self.sink is None else [("the sink", self.sink)]
        for family in self.families:
            named += [("keys", family.keys), ("values", family.values), ("a table of rows", family.table)]
            named += [("the selection", array) for array in family.bounds]
        return named

    def load(self, inputs: Inputs) -> None:
        """Write a launch into the buffers."""
        self.q[...], self.request[...] = inputs.q, inputs.request
        if self.sink is not None:
            self.sink[...] = inputs.sink
        for buffers, family in zip(self.families, inputs.families, strict=True):
            buffers.load(family, Fill.NANS.pattern(self.dtype))

    def keep(self) -> None:
        """Remember what the inputs hold, for `changed`."""
        self._loaded = [(name, array, array.copy()) for name, array in self.inputs]

    def arguments(self) -> Args:
        """Return the block of addresses and numbers."""
        _, heads, dim = self.q.shape
        families = [family.arguments() for family in self.families]
        return Args(
            q=self.q.ctypes.data,
            request=self.request.ctypes.data,
            sink=None if self.sink is None else self.sink.ctypes.data,
            out=self.out.out.ctypes.data,
            lse=self.out.lse.ctypes.data,
            lse_sink=self.out.lse_with_sink.ctypes.data,
            family=(Family * 2)(*families),
            families=len(families),
            rows=self.rows,
            heads=heads,
            kv_heads=self.kv_heads,
            dim=dim,
            value_dim=self.out.out.shape[2],
            type=DTYPES.index(self.dtype),
            scale=self.scale_bits,
        )

    def enqueue(self) -> None:
        """Call the kernel; under a capture the call is frozen."""
        memory = (*(array for _, array in self.inputs), self.out.out, self.out.lse, self.out.lse_with_sink)
        self.library.check(
            launch(self.library.handle.tka1_run, self.arguments(), self.threads, memory=memory)
        )

    def poison(self, fill: Fill) -> None:
        """Fill the outputs."""
        self.out.out.fill(fill.pattern(self.dtype))
        for lse in (self.out.lse, self.out.lse_with_sink):
            lse.fill(fill.pattern(DType.FLOAT32))

    def changed(self) -> str | None:
        """Return the name of an input that is not as `keep` found it, or None."""
        return next((name for name, array, before in self._loaded if not np.array_equal(array, before)), None)


def _bounds(family: FamilyInput) -> tuple[Array, Array]:
    part = family.selection
    return (part.ids, part.offsets) if isinstance(part, Lists) else (part.lo, part.hi)


def _by_value(inputs: Inputs) -> tuple[object, ...]:
    families = tuple(isinstance(f.selection, Lists) for f in inputs.families)
    shape = (inputs.q.shape, inputs.kv_heads, inputs.value_dim, inputs.sink is None)
    return (*shape, families, inputs.dtype, inputs.scale_bits)


def _address(array: Array, row: int) -> int:
    return array.ctypes.data + row * array.strides[0]


assert ctypes.sizeof(ctypes.c_void_p) == np.dtype(np.int64).itemsize
