"""Calls to tables: the inverse of `tracekit.store.decode`."""

from typing import Any

import numpy as np

from tracekit.errors import InvalidCall, Unsupported
from tracekit.model import Array, AttentionCall, Bits, IndexerCall, Ranges, Recording, RequestKey, Rows
from tracekit.store.column import Column
from tracekit.store.history import history_to_bytes
from tracekit.store.intake import check_call, check_indexer_call, tensors_of
from tracekit.store.launches import launch_to_json
from tracekit.store.ledger import disagreement
from tracekit.store.limits import LARGE_CHUNK, MAX_DATASETS, NONE, POOL_CHUNK, SMALL_CHUNK
from tracekit.store.nouns import (
    conventions_to_json,
    parse_conventions,
    parse_provenance,
    parse_recording,
    provenance_to_json,
    recording_to_json,
)
from tracekit.store.pools import ArrayPool, TextPool
from tracekit.store.rowlog import Entry, Indices, LogKind, RowLog, Stream, runs
from tracekit.store.schema import (
    FAMILIES,
    MODES,
    OPTIONAL_TABLES,
    ORIGINS,
    TABLES,
    Role,
    SelectionKind,
    uint,
)
from tracekit.store.spool import Spool

Line = tuple[Any, ...]


class Builder:
    """Tables and columns of a trace that grows call by call.

    Args:
        spool: takes the chunks.
        recording: what surrounds the calls.
    """

    def __init__(self, spool: Spool, recording: Recording) -> None:
        self.columns: list[Column] = []
        self.log = RowLog()
        self.calls = 0
        self.indexer_calls = 0
        self._spool, self._ledger = spool, recording.ledger
        names = ("calls", "indexer_calls", "tensors", "selections", "kv")
        self._lines: dict[str, list[Line]] = {name: [] for name in names}
        self._arrays = ArrayPool(self._pool_column)
        self._texts = TextPool()
        self._requests: dict[RequestKey, Line] = {}
        self._numbers: dict[RequestKey, int] = {}
        self._batches: dict[Line, Line] = {}
        self._batch_numbers: dict[Line, int] = {}
        self._members: list[int] = []
        self._stacks: dict[Line, tuple[int, Column]] = {}
        self._extents: list[tuple[Stream, Indices, Indices]] = []
        self._extent_count = 0
        history = None
        if recording.history is not None:
            data = np.frombuffer(history_to_bytes(recording.history), np.uint8)
            history = self._arrays.add(data, 0)
        self._texts.add(recording_to_json(recording, history), parse_recording)
        for request in recording.requests:
            if request.key in self._numbers:
                raise InvalidCall(
                    f"Request {request.key} is listed twice in the recording; list each once.",
                    rule="S-REQUEST-TWICE",
                )
            self._request(request.key, 1, request.prompt_length, self._arrays.add(request.token_ids, 0))

    def place(self, call: AttentionCall) -> list[Entry]:
        """Check a call against the limits and place its KV in the row log."""
        check_call(call)
        return self.log.add_call(call, self.calls)

    def add(self, call: AttentionCall, entries: list[Entry]) -> None:
        """Add a call whose KV is placed."""
        at, lines = self.calls, self._lines
        first = {name: len(lines[name]) for name in ("tensors", "selections", "kv")}
        for role, bits, origin in tensors_of(call):
            stack, column = self._stack(role, bits)
            lines["tensors"].append((role, ORIGINS.index(origin), stack, column.append(bits.data, at)))
        for family, part in call.selection.families.items():
            if isinstance(part, Ranges):
                kind, pair = SelectionKind.RANGES, (part.lo, part.hi)
            else:
                kind, pair = SelectionKind.LISTS, (part.ids, part.offsets)
            numbers = (self._arrays.add(array, at) for array in pair)
            lines["selections"].append((FAMILIES.index(family), kind, *numbers))
        for entry in entries:
            self._entry(entry)
        launch = NONE
        if call.launch is not None:
            launch = self._texts.add(launch_to_json(call.launch, lambda array: self._arrays.add(array, at)))
        lines["calls"].append(
            (
                call.layer,
                call.step,
                call.rank,
                MODES.index(call.mode),
                self._batch(call.rows, at),
                self._texts.add(conventions_to_json(call.conventions), parse_conventions),
                self._texts.add(provenance_to_json(call.provenance), parse_provenance),
                self._optional(call.sink, at),
                self._optional(None if call.grads is None else call.grads.d_sink, at),
                launch,
                first["tensors"],
                len(lines["tensors"]) - first["tensors"],
                first["selections"],
                len(lines["selections"]) - first["selections"],
                first["kv"],
                len(lines["kv"]) - first["kv"],
            )
        )
        self.calls += 1

    def add_indexer_call(self, call: IndexerCall) -> list[Entry]:
        """Add a call of an indexer, after all calls of attention; return the places of its keys."""
        check_indexer_call(call)
        at, lines = self.calls + self.indexer_calls, self._lines
        entries = self.log.add_indexer_call(call, at)
        first = {name: len(lines[name]) for name in ("tensors", "kv")}
        for role, bits in ((Role.INDEX_Q, call.query), (Role.INDEX_W, call.weights)):
            stack, column = self._stack(role, bits)
            lines["tensors"].append((role, 0, stack, column.append(bits.data, at)))
        for entry in entries:
            self._entry(entry)
        lines["indexer_calls"].append(
            (
                call.layer,
                call.step,
                call.rank,
                self._batch(call.rows, at),
                self._texts.add(provenance_to_json(call.provenance), parse_provenance),
                FAMILIES.index(call.family),
                call.k,
                call.scale_bits,
                self._arrays.add(call.top_k.ids, at),
                self._arrays.add(call.top_k.offsets, at),
                self._optional(call.scores, at),
                first["tensors"],
                len(lines["tensors"]) - first["tensors"],
                first["kv"],
                len(lines["kv"]) - first["kv"],
            )
        )
        self.indexer_calls += 1
        return entries

    def finish(self) -> dict[str, Array]:
        """Write the row log, finish every column and return the tables, without `chunks`.

        Raises:
            InvalidCall: S-LEDGER, the ledger counts other calls than these.
            Unsupported: S-LIMIT, more datasets than a trace may have.
        """
        wrong = disagreement(self._ledger, (line[1] for line in self._lines["calls"]))
        if wrong is not None:
            raise InvalidCall(
                f"Of a capture, {wrong[0]}; write every call, or the ledger of those that you write.",
                rule="S-LEDGER",
                step=wrong[1],
            )
        logs = self.log.logs()
        for number, (kind, streams) in enumerate(logs.items()):
            self._write_log(number, kind, streams)
        for column in self.columns:
            column.finish()
        self.columns = [column for column in self.columns if column.rows]
        if len(self.columns) > MAX_DATASETS:
            raise Unsupported(
                f"{len(self.columns)} shapes and dtypes are over the limit of {MAX_DATASETS} datasets; "
                "write several traces.",
                rule="S-LIMIT",
            )
        number_of = {kind: number for number, kind in enumerate(logs)}
        kv = [
            (role, request, family, generation, start, count, number_of[kind], extents, extent_count)
            for role, request, family, generation, start, count, kind, extents, extent_count in self._lines[
                "kv"
            ]
        ]
        lines: dict[str, list[Line]] = {
            **self._lines,
            "kv": kv,
            "logs": [
                (kind.dtype.value, kind.heads, kind.key_dim, kind.value_dim, sum(s.count for s in streams))
                for kind, streams in logs.items()
            ],
            "arrays": list(self._arrays.table),
            "batches": list(self._batches.values()),
            "requests": list(self._requests.values()),
            "texts": list(self._texts.table),
        }
        tables = {
            name: np.array(rows, TABLES[name])
            for name, rows in lines.items()
            if rows or name not in OPTIONAL_TABLES
        }
        tables["members"] = np.array(self._members, TABLES["members"])
        tables["text"] = self._texts.joined()
        tables["extents"] = self._extent_table()
        return tables

    def _entry(self, entry: Entry) -> None:
        """Only runs are kept: the places of every row of every call would be the naive size again."""
        starts, counts = runs(entry.placement.local)
        stream = entry.placement.stream
        self._lines["kv"].append(
            (
                entry.role,
                self._request(entry.request, 0, 0, NONE),
                FAMILIES.index(entry.family),
                entry.rows.generation,
                entry.rows.first,
                entry.rows.count,
                stream.key.kind,
                self._extent_count,
                starts.size,
            )
        )
        self._extents.append((stream, starts, counts))
        self._extent_count += starts.size

    def _extent_table(self) -> Array:
        table = np.empty(self._extent_count, TABLES["extents"])
        at = 0
        for stream, starts, counts in self._extents:
            part = slice(at, at + starts.size)
            table["row"][part], table["count"][part] = starts + stream.base, counts
            at += starts.size
        return table

    def _write_log(self, number: int, kind: LogKind, streams: list[Stream]) -> None:
        container, logical = kind.dtype.container, kind.dtype.value
        shapes = {"keys": (kind.heads, kind.key_dim), "values": (kind.heads, kind.value_dim)}
        for name, shape in shapes.items():
            if not shape[1]:
                continue
            path = f"{name}/{number}"
            column = Column(self._spool, path, shape, container, LARGE_CHUNK, logical)
            self.columns.append(column)
            for stream in streams:
                rows = stream.keys if name == "keys" else stream.values
                if rows is not None:
                    column.append(rows, stream.first_call)

    def _stack(self, role: Role, bits: Bits) -> tuple[int, Column]:
        """Return the stack for a tensor; small calls have their own, with chunks that fit them."""
        small = bits.data.nbytes < SMALL_CHUNK
        key = role, bits.dtype, bits.shape[1:], small
        if key not in self._stacks:
            number = sum(known[0] is role for known in self._stacks)
            target = SMALL_CHUNK if small else LARGE_CHUNK
            column = Column(
                self._spool,
                f"{role.group}/{number}",
                bits.shape[1:],
                bits.dtype.container,
                target,
                bits.dtype.value,
            )
            self.columns.append(column)
            self._stacks[key] = number, column
        return self._stacks[key]

    def _pool_column(self, width: int) -> Column:
        column = Column(self._spool, f"arrays/u{width}", (), uint(width), POOL_CHUNK)
        self.columns.append(column)
        return column

    def _request(self, key: RequestKey, listed: int, prompt_length: int, tokens: int) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._requests[key] = key.digest, key.ordinal, listed, prompt_length, tokens
        return self._numbers[key]

    def _batch(self, rows: Rows, at: int) -> int:
        members = tuple(self._request(key, 0, 0, NONE) for key in rows.requests)
        arrays = (rows.request, rows.positions, rows.token_ids)
        key = members, *(self._arrays.add(array, at) for array in arrays)
        if key not in self._batches:
            self._batch_numbers[key] = len(self._batches)
            self._batches[key] = len(self._members), len(members), *key[1:]
            self._members.extend(members)
        return self._batch_numbers[key]

    def _optional(self, bits: Bits | None, at: int) -> int:
        return NONE if bits is None else self._arrays.add(bits.data, at)
