"""Where libhdf5 writes the head of a file: in memory, so that it never meets a full disk."""

import os


class HeadSink:
    """A file object that keeps the head and drops the chunks, which are written without libhdf5."""

    def __init__(self) -> None:
        self.length = 0
        self._data = bytearray()
        self._limit: int | None = None
        self._at = 0

    def end_head(self, offset: int) -> None:
        """What is written from `offset` on is dropped."""
        self._limit = offset

    def head(self, size: int) -> bytes:
        """Return the first `size` bytes; what was never written is zero."""
        return bytes(self._data[:size]).ljust(size, b"\0")

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move, as files do."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the place, as files do."""
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer, as files do."""
        part = bytes(self._data[self._at : self._at + len(buffer)])
        buffer[:] = part.ljust(len(buffer), b"\0")
        self._at += len(buffer)
        return len(buffer)

    def write(self, data: memoryview) -> int:
        """Keep or drop bytes."""
        end = self._at + len(data)
        if self._limit is None or self._at < self._limit:
            self._data.extend(bytes(max(0, end - len(self._data))))
            self._data[self._at : end] = data
        self._at = end
        self.length = max(self.length, end)
        return len(data)

    def truncate(self, size: int) -> int:
        """Set the length, as files do."""
        self.length = size
        return size

    def flush(self) -> None:
        """Do nothing, as there is no disk."""


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte.

    Raises:
        OSError: the disk refuses.
    """
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
