"""The KV row log: each row once, however many calls read it.

A decode of n steps reads n caches, each the last one plus a row. Rows are compared by their bytes: equal
bytes are referred to, other bytes become the next *version* of that row, so nothing is lost.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tracekit.model import Array, AttentionCall, Bits, DType, IndexerCall, KVFamily, KVRows, RequestKey
from tracekit.store.schema import KVRole

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LogKind:
    """What the rows of one log have in common; `value_dim` 0 where keys and values are one tensor."""

    dtype: DType
    heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, rows: KVRows) -> "LogKind":
        """Return the kind of some rows."""
        _, heads, key_dim = rows.keys.shape
        return cls(rows.keys.dtype, heads, key_dim, 0 if rows.values is None else rows.values.shape[2])


@dataclass(frozen=True)
class StreamKey:
    """Whose rows a stream holds. `call` is 0 for rows that were read: only gradients belong to a call."""

    role: KVRole
    request: RequestKey
    layer: int
    rank: int
    family: KVFamily
    generation: int
    kind: LogKind
    call: int = 0


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the rows of one KV entry are.

    Args:
        stream: holds them.
        local: int64 `[N]`, their rows in the stream.
        version: int64 `[N]`, how many other bytes each row had before.
    """

    stream: "Stream"
    local: Indices
    version: Indices


@dataclass(frozen=True, eq=False)
class Entry:
    """One KV entry of a call."""

    role: KVRole
    request: RequestKey
    family: KVFamily
    rows: KVRows
    placement: Placement


@dataclass(eq=False)
class Stream:
    """The distinct rows of one key, in order of arrival.

    `versions[v][row]` is the place of the v-th distinct bytes of a logical row, or -1.
    """

    key: StreamKey
    first_call: int
    versions: list[Indices] = field(default_factory=list)
    count: int = 0
    base: int = 0
    _keys: Array = field(init=False)
    _values: Array | None = field(init=False)

    def __post_init__(self) -> None:
        kind = self.key.kind
        self._keys = np.empty((0, kind.heads, kind.key_dim), kind.dtype.container)
        self._values = (
            np.empty((0, kind.heads, kind.value_dim), kind.dtype.container) if kind.value_dim else None
        )

    @property
    def keys(self) -> Array:
        """`[count, Hkv, D]`."""
        return self._keys[: self.count]

    @property
    def values(self) -> Array | None:
        """`[count, Hkv, Dv]`, or None where they are the keys."""
        return None if self._values is None else self._values[: self.count]

    def add(self, rows: KVRows) -> Placement:
        """Place rows: those with known bytes where they are, the others at the end."""
        local = np.full(rows.count, -1, np.int64)
        version = np.zeros(rows.count, np.int64)
        todo = np.arange(rows.count, dtype=np.int64)
        number = 0
        while todo.size:
            places = self._version(number, rows.end)
            at = places[rows.first + todo]
            fresh, held = todo[at < 0], todo[at >= 0]
            same = self._equal(rows, held, at[at >= 0])
            local[held[same]] = at[at >= 0][same]
            # A row without this version has no later one either: its bytes are new.
            local[fresh] = self._append(rows, fresh)
            places[rows.first + fresh] = local[fresh]
            version[fresh] = number
            version[held[same]] = number
            todo, number = held[~same], number + 1
        return Placement(self, local, version)

    def _version(self, number: int, end: int) -> Indices:
        if number == len(self.versions):
            self.versions.append(np.full(end, -1, np.int64))
        places = self.versions[number]
        if places.size < end:
            grown = np.full(max(end, places.size * 3 // 2), -1, np.int64)
            grown[: places.size] = places
            places = self.versions[number] = grown
        return places

    def _equal(self, rows: KVRows, held: Indices, at: Indices) -> npt.NDArray[np.bool_]:
        """Which of the rows have the bytes that are stored at `at`."""
        if not held.size:
            return np.zeros(0, np.bool_)
        pairs = [(rows.keys.data, self._keys)]
        if rows.values is not None and self._values is not None:
            pairs.append((rows.values.data, self._values))
        if _contiguous(held) and _contiguous(at):
            mine, theirs = slice(held[0], held[-1] + 1), slice(at[0], at[-1] + 1)
            if all(np.array_equal(_wide(new[mine]), _wide(old[theirs])) for new, old in pairs):
                return np.ones(held.size, np.bool_)
        same = np.ones(held.size, np.bool_)
        for new, old in pairs:
            same &= (new[held] == old[at]).reshape(held.size, -1).all(axis=1)
        return same

    def _append(self, rows: KVRows, which: Indices) -> Indices:
        if not which.size:
            return which
        start, end = self.count, self.count + which.size
        if end > len(self._keys):
            capacity = max(end, len(self._keys) * 3 // 2)
            self._keys = _grown(self._keys, capacity)
            self._values = None if self._values is None else _grown(self._values, capacity)
        self._keys[start:end] = rows.keys.data[which]
        if rows.values is not None and self._values is not None:
            self._values[start:end] = rows.values.data[which]
        self.count = end
        return np.arange(start, end, dtype=np.int64)


class RowLog:
    """All streams of a trace."""

    def __init__(self) -> None:
        self.streams: dict[StreamKey, Stream] = {}
        self._requests: dict[RequestKey, int] = {}

    def add_call(self, call: AttentionCall, index: int) -> list[Entry]:
        """Place the KV of a call, and its gradients, which share no rows with anything."""
        entries = [self._entry(call, index, KVRole.READ, *item) for item in _flat(call.kv)]
        if call.grads is not None:
            entries += [self._entry(call, index, KVRole.GRADIENT, *item) for item in _flat(call.grads.d_kv)]
        return entries

    def add_indexer_call(self, call: IndexerCall, index: int) -> list[Entry]:
        """Place the keys of an indexer call: rows of the family `index` with one head and no values."""
        return [
            self._entry(call, index, KVRole.READ, request, KVFamily.INDEX, index_rows(keys))
            for request, keys in call.keys.items()
        ]

    def _entry(
        self,
        call: AttentionCall | IndexerCall,
        index: int,
        role: KVRole,
        request: RequestKey,
        family: KVFamily,
        rows: KVRows,
    ) -> Entry:
        owner = index if role is KVRole.GRADIENT else 0
        kind = LogKind.of(rows)
        key = StreamKey(role, request, call.layer, call.rank, family, rows.generation, kind, owner)
        self._requests.setdefault(request, len(self._requests))
        stream = self.streams.setdefault(key, Stream(key, index))
        return Entry(role, request, family, rows, stream.add(rows))

    def logs(self) -> dict[LogKind, list[Stream]]:
        """Return the streams of each log in stored order, and set their `base` in it."""
        logs: dict[LogKind, list[Stream]] = {}
        for stream in self.streams.values():
            logs.setdefault(stream.key.kind, []).append(stream)
        for streams in logs.values():
            streams.sort(key=self._order)
            base = 0
            for stream in streams:
                stream.base = base
                base += stream.count
        return logs

    def _order(self, stream: Stream) -> tuple[int | str, ...]:
        key = stream.key
        request = self._requests[key.request]
        return key.role, request, key.layer, key.rank, key.family.value, key.generation, key.call


def index_rows(keys: Bits) -> KVRows:
    """Return index keys `[N, D]` as the rows of a log."""
    return KVRows(Bits(keys.data[:, None], keys.dtype), None)


def runs(values: Indices) -> tuple[Indices, Indices]:
    """Return start and count of the maximal runs of consecutive integers."""
    if not values.size:
        return values, values
    starts = np.flatnonzero(np.diff(values, prepend=values[0] - 2) != 1)
    return values[starts], np.diff(starts, append=values.size)


def _flat(
    kv: Mapping[RequestKey, Mapping[KVFamily, KVRows]],
) -> Iterator[tuple[RequestKey, KVFamily, KVRows]]:
    for request, families in kv.items():
        for family, rows in families.items():
            yield request, family, rows


def _contiguous(indices: Indices) -> bool:
    return bool(indices[-1] - indices[0] == indices.size - 1 and (np.diff(indices) == 1).all())


def _wide(array: Array) -> Array:
    """View contiguous memory in words as wide as its size allows, to compare fewer of them."""
    return array.reshape(-1).view(np.uint64 if array.nbytes % 8 == 0 else np.uint8)


def _grown(array: Array, capacity: int) -> Array:
    grown = np.empty((capacity, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
