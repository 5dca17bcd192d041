"""Write a trace: calls become rows of tables, stacks, pools and the row log; then the file is laid out."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tracekit.env import settings
from tracekit.errors import NothingSelected
from tracekit.model import AttentionCall, IndexerCall, Recording
from tracekit.store.atomic import replacing
from tracekit.store.builder import Builder
from tracekit.store.content import ContentDigest
from tracekit.store.layout import write_file
from tracekit.store.reader import open_trace
from tracekit.store.spool import Spool
from tracekit.store.summary import TraceSummary
from tracekit.store.userblock import UserBlock

Progress = Callable[[int, int], None]


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
        InvalidCall: S-GRADS, S-REQUEST-TWICE.
        Unsupported: S-ARRAY, S-TEXT, S-SCALAR, S-LIMIT: something that the format does not hold.
        OSError: the disk or the folder refuses.
    """
    target = Path(path)
    threads = threads or settings().threads
    report = progress or _silent
    with replacing(target) as temporary, Spool(target.parent, threads) as spool:
        builder, content = Builder(spool, recording), ContentDigest()
        with ThreadPoolExecutor(1) as hasher:
            for index, call in enumerate(calls):
                entries = builder.place(call)
                hashed: Future[None] | None = None
                if threads > 1:
                    hashed = hasher.submit(content.add, call, entries)
                builder.add(call, entries)
                if hashed is None:
                    content.add(call, entries)
                else:
                    hashed.result()
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
            digest = hasher.submit(content.finish, builder.log) if threads > 1 else None
            tables = builder.finish()
            spool.settle()
            content_digest = content.finish(builder.log) if digest is None else digest.result()
        written = write_file(temporary, tables, builder.columns, spool)
        block = UserBlock(
            written.length, written.head, written.head_digest, written.payload_digest, content_digest
        )
        with temporary.open("r+b") as file:
            file.write(block.pack())
        report(builder.calls, spool.stored)
    with open_trace(target) as trace:
        return trace.summary()


def _silent(calls: int, stored: int) -> None:
    """Report nothing."""
