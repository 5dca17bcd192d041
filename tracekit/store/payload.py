"""Rows of payload datasets: fetched chunk by chunk, each checked by its digest before it is decoded."""

import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from tracekit.model import Array
from tracekit.store.codec import decode
from tracekit.store.head import Head, read_exactly
from tracekit.store.rules import corrupt
from tracekit.store.structure import PayloadSpec

CACHE = 256 << 20
"""Decoded bytes that are kept: calls of a decode share chunks, and all their KV, with their neighbours."""


class Payload:
    """The payload of an open file.

    Args:
        descriptor: the open file.
        head: its checked head.
        threads: workers that decode.
    """

    def __init__(self, descriptor: int, head: Head, threads: int) -> None:
        self._descriptor, self._head, self._threads = descriptor, head, threads
        self._cache: OrderedDict[tuple[str, int], Array] = OrderedDict()
        self._cached = 0
        self._pool: ThreadPoolExecutor | None = None

    def read(self, path: str, first: int, count: int) -> Array:
        """Return rows `first .. first + count - 1` of a dataset, `[count, ...]`.

        The caller has checked that they lie in it.

        Raises:
            TraceCorrupt: E-19, E-20.
        """
        if not count:
            return self._empty(path)
        spec = self._head.payload[path]
        out = np.empty((count, *spec.shape[1:]), spec.dtype)
        shared = path.startswith(("keys/", "values/"))
        whole: list[Callable[[], None]] = []
        for number in range(first // spec.chunk_rows, (first + count - 1) // spec.chunk_rows + 1):
            start = number * spec.chunk_rows
            lo, hi = max(first, start), min(first + count, start + spec.chunk_rows)
            part = out[lo - first : hi - first]
            if hi - lo == spec.chunk_rows and not shared and (path, number) not in self._cache:
                whole.append(lambda number=number, part=part: self.decode(spec, number, part))  # type: ignore[misc]
            else:
                part[:] = self._chunk(spec, number)[lo - start : hi - start]
        self._run(whole)
        return out

    def stored(self, spec: PayloadSpec, number: int) -> bytes:
        """Return the stored bytes of a chunk.

        Raises:
            TraceCorrupt: E-19 when they do not have their digest.
        """
        entry = self._head.tables["chunks"][spec.first_chunk + number]
        stored = read_exactly(self._descriptor, int(entry["stored"]), int(entry["offset"]))
        digest = int(entry["xxh3_high"]) << 64 | int(entry["xxh3_low"])
        if xxhash.xxh3_128_intdigest(stored) != digest:
            raise corrupt(
                "E-19",
                f"Chunk {number} of {spec.path} does not have its digest; it was damaged.",
                dataset=spec.path,
                chunk=number,
                offset=int(entry["offset"]),
            )
        return stored

    def close(self) -> None:
        """Stop the workers."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def decode(self, spec: PayloadSpec, number: int, out: Array) -> None:
        """Decode a chunk into contiguous `out`, `[chunk_rows, ...]`.

        Raises:
            TraceCorrupt: E-19, E-20.
        """
        decode(self.stored(spec, number), out, {"dataset": spec.path, "chunk": number})

    def _chunk(self, spec: PayloadSpec, number: int) -> Array:
        key = spec.path, number
        chunk = self._cache.get(key)
        if chunk is None:
            chunk = np.empty((spec.chunk_rows, *spec.shape[1:]), spec.dtype)
            self.decode(spec, number, chunk)
            self._cache[key] = chunk
            self._cached += chunk.nbytes
            while self._cached > CACHE and len(self._cache) > 1:
                self._cached -= self._cache.popitem(last=False)[1].nbytes
        self._cache.move_to_end(key)
        return chunk

    def _run(self, work: list[Callable[[], None]]) -> None:
        if self._threads < 2 or len(work) < 2:
            for task in work:
                task()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(self._threads, os.cpu_count() or 1))
        for future in [self._pool.submit(task) for task in work]:
            future.result()

    def _empty(self, path: str) -> Array:
        """A dataset without rows is absent; only one-dimensional pools are asked for nothing."""
        return np.empty(0, np.dtype(f"<u{path[-1]}"))
