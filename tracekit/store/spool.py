"""Encoded chunks on their way to the file: compressed by workers, kept until their order is known."""

import os
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from tracekit.model import Array
from tracekit.store.codec import Setting, encode

HOLD = 256 << 20
"""Encoded bytes that are kept in memory; the rest goes to an unnamed file beside the target."""


@dataclass(eq=False)
class Chunk:
    """One encoded chunk.

    Args:
        path: its dataset under `/payload`.
        number: its place in the dataset, from 0.
        call: the first call that needs it.
    """

    path: str
    number: int
    call: int
    size: int = 0
    digest: int = 0
    _held: bytes | None = None
    _offset: int = 0


class Spool:
    """Encodes chunks on `threads` workers (in the caller where that is 1) and keeps the results.

    Args:
        folder: where bytes go that do not fit in memory; the file there has no name, so a killed
            process leaves nothing.
        threads: workers.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        self.chunks: list[Chunk] = []
        self.stored = 0
        self._held = 0
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._length = 0
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._pending: deque[tuple[Chunk, Future[bytes]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._file.close()

    def submit(self, chunk: Chunk, data: Array, setting: Setting, done: Callable[[], None]) -> None:
        """Encode a chunk; `data` may be written to again after `done()` or `settle()`."""

        def work() -> bytes:
            stored = encode(data, setting)
            chunk.digest = xxhash.xxh3_128_intdigest(stored)
            done()
            return stored

        self.chunks.append(chunk)
        if self._pool is None:
            self._keep(chunk, work())
            return
        self._pending.append((chunk, self._pool.submit(work)))
        while len(self._pending) > 4 * self.threads:
            self._collect()

    def settle(self) -> None:
        """Wait until every chunk is encoded, so that memory of the caller is free again."""
        while self._pending:
            self._collect()

    def read(self, chunk: Chunk) -> bytes:
        """Return the stored bytes of a chunk."""
        if chunk._held is not None:
            return chunk._held
        return os.pread(self._file.fileno(), chunk.size, chunk._offset)

    def _collect(self) -> None:
        chunk, future = self._pending.popleft()
        self._keep(chunk, future.result())

    def _keep(self, chunk: Chunk, stored: bytes) -> None:
        chunk.size = len(stored)
        self.stored += chunk.size
        if self._held + chunk.size <= HOLD:
            chunk._held = stored
            self._held += chunk.size
        else:
            chunk._offset = self._length
            left = memoryview(stored)
            while left:  # an unbuffered write may take a part only
                left = left[self._file.write(left) :]
            self._length += chunk.size
