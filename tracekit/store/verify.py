"""Check everything about a trace, and go on after the first violation where that makes sense."""

import hashlib
import os

import numpy as np

from tracekit.errors import TraceCorrupt, TracekitError, TraceTooNew
from tracekit.store.content import ContentDigest
from tracekit.store.head import opened, read_exactly, read_head_bytes
from tracekit.store.limits import USER_BLOCK
from tracekit.store.reader import Trace, open_trace
from tracekit.store.rowlog import RowLog
from tracekit.store.rules import Violation

_PIECE = 4 << 20


def verify_trace(path: str | os.PathLike[str]) -> list[Violation]:
    """Check every rule of docs/format.md.

    Returns:
        The violations; empty for a good trace. A damaged head ends the check, as nothing behind it can
        be found; damaged chunks and calls are listed one by one.

    Raises:
        TraceMissing: F-MISSING.
        TraceUnreadable: F-KIND, F-READ.
    """
    try:
        trace = open_trace(path)
    except (TraceCorrupt, TraceTooNew) as error:
        return [_violation(error)]
    with trace:
        found = [
            *_check_payload_digest(trace),
            *_check_chunk_index(trace),
            *_check_chunks(trace),
            *_check_calls(trace),
        ]
    # Every call that needs a damaged chunk meets it again.
    return list({(violation.rule, violation.message): violation for violation in reversed(found)}.values())[
        ::-1
    ]


def _violation(error: TracekitError) -> Violation:
    fields = {key: value for key, value in error.fields.items() if key != "problem"}
    return Violation(error.rule, error.fields.get("problem", str(error)), fields)


def _check_payload_digest(trace: Trace) -> list[Violation]:
    block, digest = trace.head.block, hashlib.sha256()
    at = USER_BLOCK + block.head
    try:
        while at < block.length:
            size = min(_PIECE, block.length - at)
            digest.update(read_exactly(trace.descriptor, size, at))
            at += size
    except TraceCorrupt as error:
        return [_violation(error)]
    if digest.digest() == block.payload_digest:
        return []
    return [Violation("E-22", "The payload does not have its digest; it was damaged.")]


def _check_chunk_index(trace: Trace) -> list[Violation]:
    """HDF5's own index, by which other tools read, says the same as the table `chunks`."""
    violations = []
    try:
        _, data = read_head_bytes(trace.descriptor)
        with opened(data, trace.head.block.length) as file:
            for path, spec in trace.head.payload.items():
                found: list[tuple[int, ...]] = []
                file[f"payload/{path}"].id.chunk_iter(
                    lambda info, found=found: found.append(
                        (info.chunk_offset[0], info.byte_offset, info.size, info.filter_mask)
                    )
                )
                part = slice(spec.first_chunk, spec.first_chunk + spec.chunks)
                chunks = trace.head.tables["chunks"][part]
                starts = range(0, spec.rows, spec.chunk_rows)
                expected = zip(starts, chunks["offset"].tolist(), chunks["stored"].tolist(), strict=True)
                if sorted(found) != [(*chunk, 0) for chunk in expected]:
                    message = f"HDF5's chunk index of {path} is not that of /index/chunks."
                    violations.append(Violation("E-24", message, {"dataset": path}))
    except TraceCorrupt as error:
        violations.append(_violation(error))
    return violations


def _check_chunks(trace: Trace) -> list[Violation]:
    violations = []
    for spec in trace.head.payload.values():
        for number in range(spec.chunks):
            try:
                trace.payload.decode(spec, number, np.empty((spec.chunk_rows, *spec.shape[1:]), spec.dtype))
            except TraceCorrupt as error:
                violations.append(_violation(error))
    return violations


def _check_calls(trace: Trace) -> list[Violation]:
    """Every noun accepts what is read, and the calls have their digest."""
    violations = []
    log, content = RowLog(), ContentDigest()
    try:
        _ = trace.recording
    except TraceCorrupt as error:
        violations.append(_violation(error))
    whole = True
    for index in range(len(trace)):
        try:
            call = trace.call(index)
        except TraceCorrupt as error:
            whole = False
            violations.append(_violation(error))
            continue
        content.add(call, log.add_call(call, index))
    for index, _ in enumerate(trace.indexer_heads):
        try:
            indexer_call = trace.indexer_call(index)
        except TraceCorrupt as error:
            whole = False
            violations.append(_violation(error))
            continue
        entries = log.add_indexer_call(indexer_call, len(trace) + index)
        content.add_indexer_call(indexer_call, entries)
    if whole and content.finish(log).hex() != trace.content_digest:
        violations.append(Violation("E-23", "The calls do not have the content digest; they were changed."))
    return violations
