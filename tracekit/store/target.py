"""Where a trace is written to, and what is said where that does not work."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tracekit.errors import TracekitError, TraceUnwritable


def unwritable(target: Path, reason: str) -> TraceUnwritable:
    """Return the error of a target that cannot be written."""
    return TraceUnwritable(
        f"{target} cannot be written: {reason}; nothing was left there, choose another place.",
        rule="F-WRITE",
        path=str(target),
        reason=reason,
    )


@contextmanager
def telling(target: Path) -> Iterator[None]:
    """Tell what the system refuses while a target is written.

    Raises:
        TraceUnwritable: F-WRITE.
    """
    try:
        yield
    except TracekitError:
        raise
    except OSError as error:
        named = error.filename
        if isinstance(named, str | bytes) and Path(os.fsdecode(named)).absolute().parent != _folder(target):
            raise  # the caller's calls come from files of their own
        raise unwritable(target, (error.strerror or str(error)).lower()) from error


def _folder(target: Path) -> Path:
    return target.absolute().parent
