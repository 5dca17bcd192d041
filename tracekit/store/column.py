"""A payload dataset while it is written: rows come in, full chunks go to the spool."""

from typing import Any

import numpy as np

from tracekit.model import Array
from tracekit.store.codec import Setting, choose
from tracekit.store.limits import chunk_rows
from tracekit.store.spool import Chunk, Spool


class Column:
    """Rows of one shape, appended.

    Args:
        spool: takes the chunks.
        path: the dataset under `/payload`.
        row_shape: shape of one row; empty for a pool.
        dtype: unsigned integer of the rows.
        target: bytes of a chunk.
        logical: the `tracekit_dtype`, or empty for a pool.
    """

    def __init__(
        self,
        spool: Spool,
        path: str,
        row_shape: tuple[int, ...],
        dtype: np.dtype[Any],
        target: int,
        logical: str = "",
    ) -> None:
        self.path, self.row_shape, self.dtype, self.logical = path, row_shape, dtype, logical
        self.rows = 0
        self.chunk_rows = chunk_rows(dtype.itemsize * int(np.prod(row_shape, dtype=np.int64)), target)
        self._spool = spool
        self._setting: Setting | None = None
        self._number = 0
        self._buffer: Array | None = None
        self._fill = 0
        self._first_call = 0
        self._free: list[Array] = []

    def append(self, data: Array, call: int) -> int:
        """Append `[n, *row_shape]` for a call and return the row number of its start.

        `data` must stay as it is until `Spool.settle()`: whole chunks are encoded in place.
        """
        start, at = self.rows, 0
        while at < len(data):
            whole = self.chunk_rows
            if not self._fill and len(data) - at >= whole:
                self._seal(data[at : at + whole], call, None)
                at += whole
                continue
            if self._buffer is None:
                self._buffer = self._take()
            if not self._fill:
                self._first_call = call
            part = min(whole - self._fill, len(data) - at)
            self._buffer[self._fill : self._fill + part] = data[at : at + part]
            self._fill, at = self._fill + part, at + part
            if self._fill == whole:
                buffer, self._buffer, self._fill = self._buffer, None, 0
                self._seal(buffer, self._first_call, buffer)
        self.rows += len(data)
        return start

    def finish(self) -> None:
        """Send the last chunk, filled with zeros; a dataset of less than a chunk gets one of its length."""
        if self._fill and self._buffer is not None:
            if self._number == 0:
                self.chunk_rows = self._fill
                self._buffer = self._buffer[: self._fill]
            else:
                self._buffer[self._fill :] = 0
            self._seal(self._buffer, self._first_call, None)
            self._fill = 0

    def _seal(self, data: Array, call: int, buffer: Array | None) -> None:
        data = np.ascontiguousarray(data)
        if self._setting is None:
            self._setting = choose(data)
        chunk = Chunk(self.path, self._number, call)
        self._number += 1
        self._spool.submit(
            chunk, data, self._setting, lambda: None if buffer is None else self._free.append(buffer)
        )

    def _take(self) -> Array:
        """Reuse the memory of a chunk that is encoded: fresh pages cost as much as the copy."""
        try:
            return self._free.pop()
        except IndexError:
            return np.empty((self.chunk_rows, *self.row_shape), self.dtype)
