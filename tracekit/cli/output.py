"""stdout and stderr of the command line: no character and no closed pipe changes what a run ends with."""

import errno
import io
import os
import signal
import sys
from typing import Any, TextIO

from tracekit.verdict import Exit


class Sink(io.RawIOBase):
    """A descriptor that remembers the first failure and then drops what is written."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.error: OSError | None = None
        self._descriptor = descriptor

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether a person reads along."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any, /) -> int:
        """Write, or drop."""
        size = memoryview(data).nbytes
        if self.error is not None:
            return size
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            self.error = error
            return size


class Output:
    """Takes the place of `sys.stdout` and `sys.stderr`; `code` then gives the exit code."""

    def __init__(self) -> None:
        self._out, self._err = Sink(_descriptor(sys.stdout, 1)), Sink(_descriptor(sys.stderr, 2))
        sys.stdout, sys.stderr = _text(self._out, sys.stdout), _text(self._err, sys.stderr)

    def code(self, code: int) -> int:
        """Return the exit code of a run that ended with `code`.

        What was not told cannot count as told, but a refutation stays one.
        """
        sys.stdout.flush()
        error = self._out.error
        if error is None:
            return code
        if error.errno == errno.EPIPE:
            # The reader (`| head`) went away: no fault of anybody, and the shell's own code for it.
            return code if code == Exit.REFUTED else 128 + signal.SIGPIPE
        reason = (error.strerror or str(error)).lower()
        sys.stderr.write(f"tracekit: the output cannot be written: {reason}; send it elsewhere.\n")
        sys.stderr.flush()
        return code if code == Exit.REFUTED else Exit.USAGE


def _descriptor(stream: TextIO | None, number: int) -> int:
    """The descriptor of a stream; the null device where it was closed before the start."""
    return os.open(os.devnull, os.O_WRONLY) if stream is None else number


def _text(sink: Sink, stream: TextIO | None) -> io.TextIOWrapper:
    encoding = stream.encoding if stream is not None else "utf-8"
    return io.TextIOWrapper(
        io.BufferedWriter(sink),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=sink.isatty() or sink.fileno() == 2,
    )
