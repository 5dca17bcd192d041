"""The head of a file: user block, digests, then HDF5 metadata parsed from memory."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import h5py

from tracekit.errors import TracekitError, TraceUnreadable
from tracekit.model import Array
from tracekit.store.limits import USER_BLOCK
from tracekit.store.rules import corrupt
from tracekit.store.structure import PayloadSpec, parse_structure
from tracekit.store.userblock import UserBlock, parse_user_block


@dataclass(frozen=True, eq=False)
class Head:
    """Everything of a file but its payload; the tables are not checked yet.

    Args:
        block: the user block.
        tables: the index, by name.
        payload: the payload datasets, by path.
    """

    block: UserBlock
    tables: dict[str, Array]
    payload: dict[str, PayloadSpec]


class HeadFile:
    """A file object that holds a file's head; what lies behind it reads as zeros.

    libhdf5 gets this instead of the file, so that it sees only bytes whose digest was checked, and sees
    them once: a file that changes meanwhile changes nothing.
    """

    def __init__(self, data: bytes, length: int) -> None:
        self._data, self._length, self._at = data, length, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move, as files do."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the place, as files do."""
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer, as files do."""
        size = len(buffer)
        part = self._data[self._at : self._at + size]
        buffer[: len(part)] = part
        if len(part) < size:
            buffer[len(part) :] = bytes(size - len(part))
        self._at += size
        return size

    def read(self, size: int = -1) -> bytes:
        """Return bytes, as files do."""
        buffer = bytearray(self._length - self._at if size < 0 else size)
        self.readinto(memoryview(buffer))
        return bytes(buffer)


def read_head(descriptor: int) -> Head:
    """Read and check user block and head.

    Raises:
        TraceTooNew: E-02.
        TraceCorrupt: E-01 to E-06, E-08 to E-14.
    """
    block, data = read_head_bytes(descriptor)
    with opened(data, block.length) as file:
        tables, payload = parse_structure(file, block)
    return Head(block, tables, payload)


def read_head_bytes(descriptor: int) -> tuple[UserBlock, bytes]:
    """Read user block and head, and check their digests.

    Returns:
        The user block, and the bytes of the file up to the end of the head.

    Raises:
        TraceTooNew: E-02.
        TraceCorrupt: E-01 to E-06.
    """
    length = os.fstat(descriptor).st_size
    first = _pread(descriptor, USER_BLOCK, 0)
    block = parse_user_block(first, length)
    data = first + read_exactly(descriptor, block.head, USER_BLOCK)
    if hashlib.sha256(memoryview(data)[USER_BLOCK:]).digest() != block.head_digest:
        raise corrupt("E-06", "The head does not have its digest; it was damaged.")
    return block, data


def read_exactly(descriptor: int, size: int, offset: int) -> bytes:
    """Return `size` bytes at `offset`.

    Raises:
        TraceCorrupt: E-04 when the file ends before; it was cut while it is open.
        TraceUnreadable: F-READ.
    """
    parts = []
    while size:
        part = _pread(descriptor, size, offset)
        if not part:
            raise corrupt("E-04", f"The file ends at byte {offset}; it was cut while it is open.")
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    try:
        return os.pread(descriptor, size, offset)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise TraceUnreadable(
            f"byte {offset} cannot be read: {reason}; check the file and its disk.",
            rule="F-READ",
            reason=reason,
        ) from error


@contextmanager
def opened(data: bytes, length: int) -> Iterator[h5py.File]:
    """Open a head with libhdf5.

    Raises:
        TraceCorrupt: E-08 for whatever h5py raises, here or in the caller's block.
    """
    try:
        with h5py.File(HeadFile(data, length), "r") as file:
            yield file
    except TracekitError:
        raise
    except Exception as error:  # h5py raises most builtin errors, by what it meets
        raise corrupt("E-08", f"libhdf5 cannot read the head ({type(error).__name__}: {error}).") from None
