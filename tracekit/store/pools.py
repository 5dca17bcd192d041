"""What is stored once however often it is said: integer arrays and JSON texts."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tracekit.errors import TraceCorrupt, Unsupported
from tracekit.model import Array
from tracekit.store.canonical import canonical, parse_canonical
from tracekit.store.column import Column
from tracekit.store.limits import MAX_TEXT
from tracekit.store.schema import WIDTHS, uint


class ArrayPool:
    """Arrays by their bytes, one column a width.

    Equal bytes are recognised by their SHA-256, which is as good as comparing them and keeps none.

    Args:
        column: makes the column of a width.
    """

    def __init__(self, column: Callable[[int], Column]) -> None:
        self.table: list[tuple[int, int, int]] = []
        self._make = column
        self._columns: dict[int, Column] = {}
        self._known: dict[tuple[int, bytes], int] = {}

    def add(self, values: Array, call: int) -> int:
        """Store an array for a call and return its number.

        Raises:
            Unsupported: S-ARRAY, the elements are not 1, 2, 4 or 8 bytes of a number.
        """
        values = np.ascontiguousarray(values)
        if values.dtype.kind not in "biuf" or values.itemsize not in WIDTHS:
            raise Unsupported(
                f"An array of {values.dtype} cannot be stored; pass bools, integers or floats up to 8 bytes.",
                rule="S-ARRAY",
                dtype=str(values.dtype),
            )
        data = (
            values.astype(values.dtype.newbyteorder("<"), copy=False).reshape(-1).view(uint(values.itemsize))
        )
        key = values.itemsize, hashlib.sha256(data.data).digest()
        if key not in self._known:
            column = self._columns.get(values.itemsize)
            if column is None:
                column = self._columns[values.itemsize] = self._make(values.itemsize)
            first = column.append(data, call)
            self._known[key] = len(self.table)
            self.table.append((values.itemsize, first, data.size))
        return self._known[key]


class TextPool:
    """Canonical JSON texts by their bytes."""

    def __init__(self) -> None:
        self.table: list[tuple[int, int]] = []
        self._texts: list[bytes] = []
        self._length = 0
        self._known: dict[bytes, int] = {}

    def add(self, value: Any, parse: Callable[[Any], object] | None = None) -> int:
        """Store a value and return the number of its text.

        Args:
            value: JSON.
            parse: the reader's parser, so that what it would refuse is refused now.

        Raises:
            Unsupported: S-TEXT, the value is no JSON, too long, or nothing that the reader would take.
        """
        text = canonical(value)
        if len(text) > MAX_TEXT:
            raise Unsupported(f"A text of {len(text)} bytes is over the limit of {MAX_TEXT}.", rule="S-TEXT")
        if text not in self._known:
            if parse is not None:
                _rehearse(text, parse)
            self._known[text] = len(self.table)
            self.table.append((self._length, len(text)))
            self._texts.append(text)
            self._length += len(text)
        return self._known[text]

    def joined(self) -> Array:
        """Return uint8, all texts one after the other."""
        return np.frombuffer(b"".join(self._texts), np.uint8)


def _rehearse(text: bytes, parse: Callable[[Any], object]) -> None:
    try:
        parse(parse_canonical(text, "A description"))
    except TraceCorrupt as error:
        raise Unsupported(
            f"A description cannot be stored: {error.fields['problem']}", rule="S-TEXT"
        ) from None
