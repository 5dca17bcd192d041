"""The content digest: what the calls say, however they were batched, cut, paged and compressed.

docs/format.md, "Content digest", is the specification; the numbers in comments are its steps.
"""

import hashlib
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.model import Array, AttentionCall, Bits, IndexerCall, Lists, Mode, Ranges, RequestKey, Rows
from tracekit.store.canonical import canonical
from tracekit.store.rowlog import Entry, Indices, RowLog, Stream, runs
from tracekit.store.schema import KVRole

_PHASES = {
    Mode.TRAINING: "training",
    Mode.RECOMPUTE: "recompute",
    Mode.PREFILL: "forward",
    Mode.DECODE: "forward",
}
_PHASE_ORDER = ("forward", "recompute", "training")
_TITLE = b"tracekit content 1\n"
Runs = npt.NDArray[np.uint64]


class ContentDigest:
    """Takes calls in recorded order, with the places that one `RowLog` gave to their KV."""

    def __init__(self) -> None:
        self._requests: dict[RequestKey, int] = {}
        self._keys: list[Array] = []
        self._records: list[Array] = []
        self._gradients: list[tuple[bytes, bytes]] = []
        self._indexer_keys: list[Array] = []
        self._indexer_records: list[Array] = []

    def add(self, call: AttentionCall, entries: list[Entry]) -> None:
        """Add one call."""
        self._keys.append(self._row_keys(call, _PHASE_ORDER.index(_PHASES[call.mode])))
        self._records.append(_row_records(call, entries))
        self._gradients.extend(_gradient_records(call, entries))

    def add_indexer_call(self, call: IndexerCall, entries: list[Entry]) -> None:
        """Add one call of an indexer."""
        places = {entry.request: entry for entry in entries}
        candidates = Ranges(np.zeros(call.num_rows, np.int64), call.visible)
        read = rows_read(call.rows, candidates, [places[request] for request in call.rows.requests])
        self._indexer_keys.append(self._row_keys(call, 0))
        self._indexer_records.append(_indexer_records(call, read))

    def finish(self, log: RowLog) -> bytes:
        """Return the digest, 32 bytes."""
        total = hashlib.sha256(_TITLE)
        records = self._sorted_records(self._keys, self._records)
        total.update(u8(len(records)) + records.tobytes())
        streams = sorted(
            _stream_record(stream) for stream in log.streams.values() if stream.key.role is KVRole.READ
        )
        total.update(u8(len(streams)) + b"".join(record for _, record in streams))
        gradients = sorted(self._gradients, key=lambda pair: pair[0])
        total.update(u8(len(gradients)) + b"".join(record for _, record in gradients))
        if self._indexer_records:
            records = self._sorted_records(self._indexer_keys, self._indexer_records)
            total.update(u8(len(records)) + records.tobytes())
        return total.digest()

    def _row_keys(self, call: AttentionCall | IndexerCall, phase: int) -> Array:
        """int64 `[T, 5]`: request, layer, rank, phase, position."""
        numbers = [self._requests.setdefault(key, len(self._requests)) for key in call.rows.requests]
        keys = np.empty((call.num_rows, 5), np.int64)
        keys[:, 0] = np.array(numbers, np.int64)[call.rows.request]
        keys[:, 1:4] = call.layer, call.rank, phase
        keys[:, 4] = call.rows.positions
        return keys

    def _sorted_records(self, parts: list[Array], records: list[Array]) -> Array:
        if not parts:
            return np.zeros((0, 32), np.uint8)
        keys = np.concatenate(parts)
        place = np.empty(len(self._requests), np.int64)
        for rank, request in enumerate(sorted(self._requests)):
            place[self._requests[request]] = rank
        keys[:, 0] = place[keys[:, 0]]
        # lexsort is stable, so equal keys stay in call order.
        return np.concatenate(records)[np.lexsort(keys.T[::-1])]


def u8(value: int) -> bytes:
    """Return an integer as 8 bytes."""
    return value.to_bytes(8, "little")


def _header(call: AttentionCall) -> bytes:
    """2: what all rows of a call have in common."""
    grads = call.grads
    header = {
        "conventions": asdict(call.conventions),
        "d_out": None if grads is None else grads.d_out.dtype.value,
        "d_q": None if grads is None or grads.d_q is None else grads.d_q.dtype.value,
        "dtype": call.dtype.value,
        "head_dim": call.head_dim,
        "kv_heads": call.num_kv_heads,
        "layer": call.layer,
        "lse": None if call.lse is None else call.lse.origin.value,
        "out": None if call.out is None else call.out.origin.value,
        "phase": _PHASES[call.mode],
        "rank": call.rank,
        "shape": [call.num_heads, call.head_dim, call.value_dim],
        "sink": None if call.sink is None else hashlib.sha256(call.sink.data.data).hexdigest(),
    }
    return hashlib.sha256(canonical(header)).digest()


def _row_records(call: AttentionCall, entries: list[Entry]) -> Array:
    """3: uint8 `[T, 32]`, one digest a row."""
    parts = [call.q]
    parts += [output.bits for output in (call.out, call.lse) if output is not None]
    if call.grads is not None:
        parts += [bits for bits in (call.grads.d_out, call.grads.d_q) if bits is not None]
    identity, families = identity_bytes(call.rows), _selections(call, entries)
    views = [(rows.reshape(-1).data, rows.shape[1]) for rows in (identity, *map(row_bytes, parts))]
    records = np.empty((call.num_rows, 32), np.uint8)
    start = hashlib.sha256(_header(call))
    for t in range(call.num_rows):
        digest = start.copy()
        for view, width in views:
            digest.update(view[t * width : (t + 1) * width])
        digest.update(b"".join([selection[t] for selection in families]))
        records[t] = np.frombuffer(digest.digest(), np.uint8)
    return records


def identity_bytes(rows: Rows) -> Array:
    """uint8 `[T, 40]`: request digest, ordinal, position, token."""
    columns = np.empty((rows.count, 40), np.uint8)
    digests = np.array([list(key.digest.encode()) for key in rows.requests], np.uint8)
    ordinals = np.array([key.ordinal for key in rows.requests], "<u8")
    columns[:, :16] = digests[rows.request]
    for at, values in (
        (16, ordinals[rows.request]),
        (24, rows.positions),
        (32, rows.token_ids),
    ):
        columns[:, at : at + 8] = np.ascontiguousarray(values, "<i8").view(np.uint8).reshape(-1, 8)
    return columns


def row_bytes(bits: Bits) -> Array:
    """Return uint8 `[T, n]`, the bytes of each row."""
    return bits.data.reshape(bits.shape[0], -1).view(np.uint8)


def _selections(call: AttentionCall, entries: list[Entry]) -> list[list[bytes]]:
    """The selection of each family, then row, as bytes."""
    places = {(entry.request, entry.family): entry for entry in entries if entry.role is KVRole.READ}
    return [
        rows_read(call.rows, part, [places[request, family] for request in call.rows.requests])
        for family, part in call.selection.families.items()
    ]


def rows_read(rows: Rows, part: Ranges | Lists, held: list[Entry]) -> list[bytes]:
    """What each row reads of one family, as bytes; `held` is the KV entry of each request."""
    plain = all(not entry.placement.version.any() for entry in held)
    if plain and isinstance(part, Ranges):
        counts, table = _range_runs(part)
    else:
        counts, table = _list_runs(rows, part, held, plain)
    heads = [entry.family.value.encode().ljust(8, b"\0") + u8(entry.rows.generation) for entry in held]
    ends = np.cumsum(counts) * 24
    body = table.tobytes()
    return [
        heads[request] + u8(count) + body[end - 24 * count : end]
        for request, count, end in zip(rows.request.tolist(), counts.tolist(), ends.tolist(), strict=True)
    ]


def _range_runs(part: Ranges) -> tuple[Indices, Runs]:
    """Runs of ranges over rows that have only one version: one a row, none where it is empty."""
    some = part.hi > part.lo
    table = np.zeros((int(some.sum()), 3), "<u8")
    table[:, 0] = part.lo[some]
    table[:, 1] = (part.hi - part.lo)[some]
    return some.astype(np.int64), table


def _list_runs(rows: Rows, part: Ranges | Lists, held: list[Entry], plain: bool) -> tuple[Indices, Runs]:
    """Maximal runs of consecutive ids of one version, row by row: runs a row, and all runs `[n, 3]`."""
    lists = part if isinstance(part, Lists) else Lists.of([part.row(t) for t in range(part.rows)])
    ids = lists.ids
    owner = np.repeat(np.arange(lists.rows), np.diff(lists.offsets))
    version = np.zeros(ids.size, np.int64)
    if not plain:
        request = rows.request[owner]
        for index, entry in enumerate(held):
            mine = request == index
            version[mine] = entry.placement.version[ids[mine] - entry.rows.first]
    new = np.ones(ids.size, np.bool_)
    new[1:] = (np.diff(ids) != 1) | (np.diff(owner) != 0) | (np.diff(version) != 0)
    starts = np.flatnonzero(new)
    table = np.empty((starts.size, 3), "<u8")
    table[:, 0], table[:, 1], table[:, 2] = ids[starts], np.diff(starts, append=ids.size), version[starts]
    return np.bincount(owner[starts], minlength=lists.rows).astype(np.int64), table


def _stream_record(stream: Stream) -> tuple[bytes, bytes]:
    """5: the distinct KV rows of one stream, version by version."""
    key = stream.key
    header = canonical(
        {
            "dtype": key.kind.dtype.value,
            "family": key.family.value,
            "generation": key.generation,
            "layer": key.layer,
            "rank": key.rank,
            "request": str(key.request),
            "shape": [key.kind.heads, key.kind.key_dim, key.kind.value_dim],
        }
    )
    digest = hashlib.sha256(header)
    for places in stream.versions:
        rows = np.flatnonzero(places >= 0)
        first, count = runs(rows)
        digest.update(u8(first.size) + np.stack([first, count], axis=1).astype("<u8").tobytes())
        for tensor in (stream.keys, stream.values):
            if tensor is not None:
                _update_rows(digest, tensor, places[rows])
    return header, digest.digest()


def _update_rows(digest: Any, tensor: Array, places: Indices) -> None:
    """Hash rows in order, whole runs at once."""
    for first, count in zip(*(part.tolist() for part in runs(places)), strict=True):
        digest.update(np.ascontiguousarray(tensor[first : first + count]))


def _indexer_records(call: IndexerCall, read: list[bytes]) -> Array:
    """8: uint8 `[T, 32]`, one digest a row; `read` are the keys that it chose among."""
    header = {
        "dtype": call.query.dtype.value,
        "family": call.family.value,
        "k": call.k,
        "layer": call.layer,
        "rank": call.rank,
        "scale_bits": call.scale_bits,
        "scores": call.scores is not None,
        "shape": list(call.query.shape[1:]),
        "weights": call.weights.dtype.value,
    }
    start = hashlib.sha256(canonical(header)).digest()
    rows = [identity_bytes(call.rows), row_bytes(call.query), row_bytes(call.weights)]
    ids = call.top_k.ids.astype("<u8")
    offsets = call.top_k.offsets.tolist()
    records = np.empty((call.num_rows, 32), np.uint8)
    for t in range(call.num_rows):
        chosen = slice(offsets[t], offsets[t + 1])
        digest = hashlib.sha256(start + b"".join(part[t].tobytes() for part in rows) + read[t])
        digest.update(u8(offsets[t + 1] - offsets[t]) + ids[chosen].tobytes())
        if call.scores is not None:
            digest.update(call.scores.data[chosen].tobytes())
        records[t] = np.frombuffer(digest.digest(), np.uint8)
    return records


def _gradient_records(call: AttentionCall, entries: list[Entry]) -> list[tuple[bytes, bytes]]:
    """6: gradients that belong to a call, not to a row."""
    if call.grads is None:
        return []
    common = {"layer": call.layer, "phase": _PHASES[call.mode], "rank": call.rank}
    found: list[tuple[dict[str, Any], list[Bits]]] = []
    for entry in entries:
        if entry.role is KVRole.GRADIENT:
            rows = entry.rows
            value_dim = 0 if rows.values is None else rows.values.shape[2]
            header: dict[str, Any] = {
                "family": entry.family.value,
                "generation": rows.generation,
                "first": rows.first,
                "dtype": rows.keys.dtype.value,
                "request": str(entry.request),
                "shape": [*rows.keys.shape, value_dim],
            }
            found.append((header, [rows.keys] if rows.values is None else [rows.keys, rows.values]))
    if call.grads.d_sink is not None:
        sink = call.grads.d_sink
        header = {"family": None, "generation": None, "first": None, "request": None}
        found.append(({**header, "dtype": sink.dtype.value, "shape": list(sink.shape)}, [sink]))
    records = []
    for fields, tensors in found:
        text = canonical({**common, **fields})
        digest = hashlib.sha256(text)
        for bits in tensors:
            digest.update(bits.data.data)
        records.append((text, digest.digest()))
    return records
