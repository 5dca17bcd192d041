"""Write a trace: calls become rows of tables, stacks, pools and the row log; then the file is laid out."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from tracekit.env import settings
from tracekit.errors import NothingSelected
from tracekit.model import Array, AttentionCall, IndexerCall, Recording
from tracekit.store.atomic import replacing
from tracekit.store.builder import Builder
from tracekit.store.content import ContentDigest
from tracekit.store.layout import write_file
from tracekit.store.reader import open_trace
from tracekit.store.spool import Spool
from tracekit.store.summary import TraceSummary
from tracekit.store.target import refuse_kind, telling
from tracekit.store.userblock import UserBlock

Progress = Callable[[int, int], None]
T = TypeVar("T")


def write_trace(
    path: str | os.PathLike[str],
    recording: Recording,
    calls: Iterable[AttentionCall],
    *,
    indexer_calls: Iterable[IndexerCall] = (),
    threads: int = 0,
    progress: Progress | None = None,
) -> TraceSummary:
    """Write a trace (docs/format.md). The file is there complete or not at all.

    Each call is taken in completely before the next one is asked for, so a caller may reuse its memory.
    KV rows stay in memory until the end, each distinct row once; everything else is compressed on arrival.

    Args:
        path: the target; replaced if it exists.
        recording: requests, ledger, model, notes.
        calls: at least one, in recorded order.
        indexer_calls: launches of sparse indexers, in recorded order.
        threads: workers that compress; 0 for `TRACEKIT_THREADS`, which is the cores by default.
        progress: called after each call, and before the rename, with the calls and compressed bytes so far.

    Returns:
        What was written.

    Raises:
        NothingSelected: S-EMPTY, there is no call: a trace without calls could only mislead.
        InvalidCall: S-REQUEST-TWICE, S-LEDGER.
        Unsupported: S-ARRAY, S-TEXT, S-SCALAR, S-LIMIT: something that the format does not hold.
        TraceUnwritable: F-KIND, the target is no file; F-WRITE, the disk or the folder refuses. Nothing is
            left behind, and a target that exists stays.
    """
    target = Path(path)
    with telling(target):
        refuse_kind(target)
        _write(target, recording, calls, indexer_calls, threads or settings().threads, progress or _silent)
    with open_trace(target) as trace:
        return trace.summary()


def _write(
    target: Path,
    recording: Recording,
    calls: Iterable[AttentionCall],
    indexer_calls: Iterable[IndexerCall],
    threads: int,
    report: Progress,
) -> None:
    with replacing(target) as temporary, Spool(target.parent, threads) as spool:
        builder = Builder(spool, recording)
        tables, content_digest = _take_in(builder, calls, indexer_calls, spool, threads, report, target)
        written = write_file(temporary, tables, builder.columns, spool)
        block = UserBlock(
            written.length, written.head, written.head_digest, written.payload_digest, content_digest
        )
        with temporary.open("r+b") as file:
            file.write(block.pack())
        report(builder.calls, spool.stored)


def _take_in(
    builder: Builder,
    calls: Iterable[AttentionCall],
    indexer_calls: Iterable[IndexerCall],
    spool: Spool,
    threads: int,
    report: Progress,
    target: Path,
) -> tuple[dict[str, Array], bytes]:
    """Add every call and return the tables and the content digest, hashed meanwhile where threads allow."""
    content = ContentDigest()
    with ThreadPoolExecutor(1) as hasher:
        for index, call in enumerate(calls):
            entries = builder.place(call)
            hashed = _begin(hasher, threads, partial(content.add, call, entries))
            builder.add(call, entries)
            hashed()
            spool.settle()
            report(index + 1, spool.stored)
        if not builder.calls:
            raise NothingSelected(
                f"No call was recorded, so {target.name} is not written; a trace without calls proves "
                "nothing. Check the filters of the recording.",
                rule="S-EMPTY",
                path=str(target),
            )
        for indexer_call in indexer_calls:
            content.add_indexer_call(indexer_call, builder.add_indexer_call(indexer_call))
            spool.settle()
        digest = _begin(hasher, threads, partial(content.finish, builder.log))
        tables = builder.finish()
        spool.settle()
        return tables, digest()


def _begin(hasher: ThreadPoolExecutor, threads: int, work: Callable[[], T]) -> Callable[[], T]:
    """Begin some work; the answer waits for it, or does it where one thread is all there is."""
    return hasher.submit(work).result if threads > 1 else work


def _silent(calls: int, stored: int) -> None:
    """Report nothing."""
