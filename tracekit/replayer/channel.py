"""Pickled messages over a socket, each behind its length, with a deadline over the whole of each.

A frame is a length (unsigned, 8 bytes, big endian) and as many bytes. The deadline covers every byte, so a
half-sent frame keeps nobody waiting, and a length beyond what was agreed is refused before memory is taken.
"""

import pickle
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct(">Q")


class TooLong(Exception):
    """A frame says that it is longer than was agreed."""


class Unreadable(Exception):
    """A frame came whole, but is no message."""


class Channel:
    """One end of a socket pair.

    Args:
        end: the socket, which the channel owns from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: Any, deadline: float | None = None) -> None:
        """Send a message.

        Args:
            message: anything that can be pickled.
            deadline: on the clock `time.monotonic`; None waits for ever.

        Raises:
            TimeoutError: the deadline passed.
            OSError: the other end is gone.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for part in (_LENGTH.pack(len(data)), data):
            view = memoryview(part)
            while view:
                self._limit(deadline)
                view = view[self._end.send(view) :]

    def receive(self, deadline: float | None = None, most: int | None = None) -> Any:
        """Receive a message.

        Args:
            deadline: as for `send`.
            most: bytes that it may have.

        Raises:
            TimeoutError: the deadline passed.
            TooLong: it would have more bytes than `most`.
            Unreadable: the bytes are no message.
            EOFError: the other end hung up.
            OSError: the other end is gone.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if most is not None and length > most:
            raise TooLong(f"{length:,} bytes where at most {most:,} were asked for")
        data = self._read(length, deadline)
        try:
            return pickle.loads(data)
        except Exception as error:  # unpickling runs whatever the bytes ask for
            raise Unreadable(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Hang up."""
        self._end.close()

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            self._limit(deadline)
            count = self._end.recv_into(view)
            if not count:
                raise EOFError("the other end hung up")
            view = view[count:]
        return data

    def _limit(self, deadline: float | None) -> None:
        """Let the next operation take the time that is left."""
        if deadline is None:
            self._end.settimeout(None)
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline passed")
        self._end.settimeout(left)
