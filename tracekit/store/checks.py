"""The index tables: every number lies in what it points into, before anything is read by it."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.model import Array
from tracekit.store.head import Head
from tracekit.store.limits import MAX_CALL, MAX_DIMENSION, MAX_NUMBER, MAX_TEXT, NONE, USER_BLOCK
from tracekit.store.rules import corrupt
from tracekit.store.schema import (
    DTYPES,
    FAMILIES,
    INDEXER_ROLES,
    MODES,
    ORIGINS,
    OWNERS,
    WIDTHS,
    KVRole,
    Role,
    SelectionKind,
)
from tracekit.store.sizes import decoded_bytes, owned, rows_of

_END = np.uint64(MAX_NUMBER)


def check_tables(head: Head) -> None:
    """Check the tables of a head against each other and the payload.

    Raises:
        TraceCorrupt: E-07, E-16, E-17, E-18, E-25, E-26, E-27, E-28.
    """
    _check_chunks(head)
    tables = head.tables
    if not tables["calls"].size:
        raise corrupt("E-25", "The trace holds no call.")
    _check_codes(tables)
    _check_spans(head)
    _check_references(tables)
    _check_stacks(head)
    _check_logs(head)
    _check_widths(head)
    _check_extents(tables)
    _check_sizes(head)


def _refuse(rule: str, bad: npt.NDArray[np.bool_], table: str, problem: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise corrupt(rule, f"Row {row} of /index/{table}: {problem}.", table=table, row=row)


def _refuse_owner(rule: str, bad: npt.NDArray[np.bool_], tables: dict[str, Array], problem: str) -> None:
    split = len(tables[OWNERS[0]])
    for name, part in zip(OWNERS, (bad[:split], bad[split:]), strict=True):
        _refuse(rule, part, name, problem)


def _check_chunks(head: Head) -> None:
    chunks, block = head.tables["chunks"], head.block
    expected = sum(spec.chunks for spec in head.payload.values())
    if len(chunks) != expected:
        raise corrupt("E-18", f"The datasets have {expected} chunks and /index/chunks {len(chunks)}.")
    order = np.argsort(chunks["offset"], kind="stable")
    ends = np.empty(len(chunks) + 1, np.uint64)
    ends[0] = USER_BLOCK + block.head
    ends[1:] = chunks["offset"][order] + chunks["stored"][order]
    starts = np.append(chunks["offset"][order], np.uint64(block.length))
    if (starts != ends).any():
        at = int(ends[int(np.argmax(starts != ends))])
        raise corrupt("E-18", f"The chunks leave a gap or overlap at byte {at}.", offset=at)


def _check_codes(tables: dict[str, Array]) -> None:
    codes: tuple[tuple[str, str, int], ...] = (
        ("calls", "mode", len(MODES)),
        ("tensors", "role", len(Role)),
        ("tensors", "origin", len(ORIGINS)),
        ("selections", "family", len(FAMILIES)),
        ("selections", "kind", len(SelectionKind)),
        ("kv", "role", len(KVRole)),
        ("kv", "family", len(FAMILIES)),
        ("requests", "listed", 2),
        ("indexer_calls", "family", len(FAMILIES)),
    )
    for table, field, count in codes:
        _refuse("E-16", tables[table][field] >= count, table, f"{field} is no known code")
    _refuse("E-16", ~np.isin(tables["arrays"]["width"], WIDTHS), "arrays", "the width is not 1, 2, 4 or 8")
    known = [name.encode() for name in DTYPES]
    _refuse("E-16", ~np.isin(tables["logs"]["dtype"], known), "logs", "the dtype is unknown")


def _check_spans(head: Head) -> None:
    """Spans of one table follow one another in another one, so that their sizes add up to its size."""
    tables = head.tables
    for first, count in (("tensors", "tensor_count"), ("kv", "kv_count")):
        starts, sizes = owned(tables, first), owned(tables, count).astype(np.uint64)
        ends = np.cumsum(sizes)
        _refuse_owner("E-16", starts != ends - sizes, tables, f"{first} does not follow the row before")
        if int(ends[-1] if ends.size else 0) != len(tables[first]):
            raise corrupt("E-16", f"The calls speak of more or less than all of /index/{first}.")
    for table, first, count, into in (
        ("calls", "selections", "selection_count", "selections"),
        ("kv", "extents", "extent_count", "extents"),
        ("batches", "members", "member_count", "members"),
        ("texts", "first", "size", "text"),
    ):
        starts, sizes = tables[table][first], tables[table][count].astype(np.uint64)
        ends = np.cumsum(sizes)
        _refuse("E-16", starts != ends - sizes, table, f"{first} does not follow the row before")
        if int(ends[-1] if ends.size else 0) != len(tables[into]):
            raise corrupt("E-16", f"/index/{table} speaks of more or less than all of /index/{into}.")
    _refuse("E-15", tables["texts"]["size"] > MAX_TEXT, "texts", "the text is over the limit")
    arrays = tables["arrays"]
    pools = {width: head.payload.get(f"arrays/u{width}") for width in WIDTHS}
    for width, pool in pools.items():
        rows = np.uint64(0 if pool is None else pool.rows)
        bad = (arrays["first"] > rows) | (arrays["count"] > rows - np.minimum(arrays["first"], rows))
        _refuse("E-16", bad & (arrays["width"] == width), "arrays", "the array ends past its pool")


def _check_references(tables: dict[str, Array]) -> None:
    for table, field, into, optional in (
        ("calls", "batch", "batches", False),
        ("calls", "conventions", "texts", False),
        ("calls", "provenance", "texts", False),
        ("calls", "sink", "arrays", True),
        ("calls", "d_sink", "arrays", True),
        ("calls", "launch", "texts", True),
        ("indexer_calls", "batch", "batches", False),
        ("indexer_calls", "provenance", "texts", False),
        ("indexer_calls", "ids", "arrays", False),
        ("indexer_calls", "offsets", "arrays", False),
        ("indexer_calls", "scores", "arrays", True),
        ("selections", "a", "arrays", False),
        ("selections", "b", "arrays", False),
        ("kv", "request", "requests", False),
        ("kv", "log", "logs", False),
        ("batches", "request", "arrays", False),
        ("batches", "positions", "arrays", False),
        ("batches", "tokens", "arrays", False),
        ("members", "", "requests", False),
        ("requests", "tokens", "arrays", True),
    ):
        values = tables[table][field] if field else tables[table]
        bad = values >= len(tables[into])
        if optional:
            bad &= values != NONE
        _refuse("E-16", bad, table, f"{field or 'it'} points past /index/{into}")
    if not len(tables["texts"]):
        raise corrupt("E-16", "/index/texts has no recording.")
    requests, kv = tables["requests"], tables["kv"]
    named = np.stack([requests["digest"].astype("S24"), requests["ordinal"].astype("S24")], axis=1)
    if len(np.unique(named, axis=0)) != len(requests):
        raise corrupt("E-28", "/index/requests names a request twice.")
    unlisted = (requests["tokens"] == NONE) != (requests["listed"] == 0)
    _refuse("E-28", unlisted, "requests", "token ids belong to listed requests, and only to them")
    large = (kv["first"] >= _END) | (kv["count"] >= _END) | (kv["generation"] >= _END)
    _refuse_owner("E-16", owned(tables, "step") >= _END, tables, "the step is 2^62 or more")
    _refuse("E-16", large, "kv", "a number is 2^62 or more")


def _check_stacks(head: Head) -> None:
    tables = head.tables
    tensors, calls = tables["tensors"], len(tables["calls"])
    counts = owned(tables, "tensor_count")
    rows = np.repeat(rows_of(tables, owned(tables, "batch")), counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    pairs = np.stack([owner, tensors["role"].astype(np.int64)], axis=1)
    if len(np.unique(pairs, axis=0)) != len(pairs):
        raise corrupt("E-28", "A call has one tensor twice.")
    has = {role: np.isin(np.arange(len(counts)), owner[tensors["role"] == role]) for role in Role}
    indexer = np.arange(len(counts)) >= calls
    _refuse_owner("E-28", ~has[Role.Q] & ~indexer, tables, "it has no q")
    for role in Role:
        needed = indexer & (role in INDEXER_ROLES)
        wrong = needed & ~has[role] | has[role] & (indexer != (role in INDEXER_ROLES))
        _refuse_owner("E-28", wrong, tables, f"{role.group} is missing, or of the other kind of call")
    grads = has[Role.D_Q][:calls] | (tables["calls"]["d_sink"] != NONE)
    _refuse("E-28", grads & ~has[Role.D_OUT][:calls], "calls", "it has gradients without d_out")
    for role in Role:
        mine = tensors["role"] == role
        sizes: list[int] = []
        while (spec := head.payload.get(f"{role.group}/{len(sizes)}")) is not None:
            sizes.append(spec.rows)
        limit = np.array([*sizes, 0], np.uint64)
        _refuse("E-16", mine & (tensors["stack"] >= len(sizes)), "tensors", "there is no such stack")
        held = limit[np.minimum(tensors["stack"], len(sizes))]
        bad = (tensors["first"] > held) | (rows > held - np.minimum(tensors["first"], held))
        _refuse("E-16", mine & bad, "tensors", "its rows end past its stack")


def _check_logs(head: Head) -> None:
    logs = head.tables["logs"]
    dims = np.stack([logs["heads"], logs["key_dim"]], axis=1)
    bad = ((dims < 1) | (dims > MAX_DIMENSION)).any(axis=1) | (logs["value_dim"] > MAX_DIMENSION)
    _refuse("E-28", bad, "logs", "a dimension is outside the limits")
    expected: dict[str, tuple[Any, ...]] = {}
    for number, (dtype, heads, key_dim, value_dim, rows) in enumerate(logs.tolist()):
        if rows:
            expected[f"keys/{number}"] = (rows, heads, key_dim), dtype
            if value_dim:
                expected[f"values/{number}"] = (rows, heads, value_dim), dtype
    found = {
        path: (spec.shape, (spec.logical or "").encode())
        for path, spec in head.payload.items()
        if path.startswith(("keys/", "values/"))
    }
    for path in sorted(expected.keys() | found.keys()):
        if expected.get(path) != found.get(path):
            raise corrupt("E-28", f"/payload/{path} is not what /index/logs says.", dataset=path)


def _check_widths(head: Head) -> None:
    """Arrays have the width and the length that their use needs."""
    tables = head.tables
    arrays, calls, batches = tables["arrays"], tables["calls"], tables["batches"]

    def need(table: str, field: str, references: Array, width: int, count: Array | None) -> None:
        used = references != NONE
        array = arrays[references[used]]
        bad = array["width"] != width
        if count is not None:
            bad = bad | (array["count"] != count[used])
        _refuse("E-28", bad, table, f"the array of {field} has another width or length")

    of_batch = arrays["count"][batches["positions"]]
    need("batches", "positions", batches["positions"], 8, None)
    need("batches", "request", batches["request"], 4, of_batch)
    need("batches", "tokens", batches["tokens"], 8, of_batch)
    need("requests", "tokens", tables["requests"]["tokens"], 8, None)
    rows = np.repeat(rows_of(tables, calls), calls["selection_count"])
    selections = tables["selections"]
    lists = selections["kind"] == SelectionKind.LISTS
    need("selections", "b", selections["b"], 8, rows + lists)
    need("selections", "a", selections["a"], 8, np.where(lists, arrays["count"][selections["a"]], rows))
    tensors = tables["tensors"]
    heads = np.array(
        [head.payload[f"q/{stack}"].shape[1] for stack in tensors["stack"][tensors["role"] == Role.Q]],
        np.uint64,
    )
    need("calls", "sink", calls["sink"], 4, heads)
    need("calls", "d_sink", calls["d_sink"], 4, heads)
    indexers = tables["indexer_calls"]
    chosen = arrays["count"][indexers["ids"]]
    need("indexer_calls", "ids", indexers["ids"], 8, None)
    need("indexer_calls", "offsets", indexers["offsets"], 8, rows_of(tables, indexers) + np.uint64(1))
    need("indexer_calls", "scores", indexers["scores"], 4, chosen)


def _check_extents(tables: dict[str, Array]) -> None:
    kv, extents = tables["kv"], tables["extents"]
    owner = np.repeat(np.arange(len(kv)), kv["extent_count"])
    held = tables["logs"]["rows"][kv["log"]][owner]
    row, count = extents["row"], extents["count"]
    _refuse("E-16", count == 0, "extents", "it is empty")
    past = (row > held) | (count > held - np.minimum(row, held))
    if past.any():
        at = int(np.argmax(past))
        entry = kv[owner[at]]
        call = int(np.searchsorted(owned(tables, "kv"), owner[at], side="right")) - 1
        raise corrupt(
            "E-07",
            f"KV extent {at} of call {call} (request {int(entry['request'])}, layer "
            f"{int(owned(tables, 'layer')[call])}, family {FAMILIES[int(entry['family'])]}) ends at row "
            f"{int(row[at]) + int(count[at])}, but the row log holds {int(held[at])}.",
            extent=at,
            call=call,
        )
    order = np.lexsort((row, owner))
    same = np.diff(owner[order]) == 0
    overlap = same & (row[order][1:] < (row + count)[order][:-1])
    _refuse("E-17", overlap, "extents", "it or its neighbour in the log overlaps another of its KV entry")
    # Extents of one entry lie in the log and do not overlap, so the differences of this sum are right
    # even where the sum itself wraps.
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(count)])
    sums = total[kv["extents"] + kv["extent_count"]] - total[kv["extents"]]
    _refuse("E-26", sums != kv["count"], "kv", "its extents hold another number of rows")


def _check_sizes(head: Head) -> None:
    over = decoded_bytes(head) > MAX_CALL
    _refuse_owner("E-27", over, head.tables, "decoded, it is over the limit")
