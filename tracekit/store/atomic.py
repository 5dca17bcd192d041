"""A file that is there complete or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a new file `NAME.RANDOM.tmp` beside the target; on success it is on the disk under its name.

    Each writer has a file of its own, so of two writers to one target the last to finish stays, whole. An
    exception removes the file and leaves the target as it was; a killed process leaves both.
    """
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
    temporary.open("xb").close()
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
