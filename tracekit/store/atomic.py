"""A file that is there complete or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield `NAME.tmp` beside the target; on success it is on the disk under the target's name.

    An exception removes it and leaves the target as it was. A killed process may leave `NAME.tmp`, which
    the next writer overwrites.
    """
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Flush a file or the entries of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
