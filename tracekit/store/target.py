"""Where a trace is written to, and what is said where that does not work."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tracekit.errors import TracekitError, TraceUnwritable, UsageError
from tracekit.store.reader import kind_of

_TEMPORARY = 32
"""Bytes by which the name of the temporary file beside a target may be longer."""


def check_target(path: str | os.PathLike[str], *, force: bool) -> Path:
    """Return a target that can be written, as far as that can be said before there is something to write.

    Raises:
        UsageError: U-FOLDER, there is no folder; U-EXISTS, there is a file and no `force`.
        TraceUnwritable: F-KIND, it is a folder, a pipe or a device; F-WRITE, the folder takes no such file.
    """
    target = Path(path)
    try:
        if not target.parent.is_dir():
            raise UsageError(
                f"there is no folder {target.parent} to write {target.name} into; make it first.",
                rule="U-FOLDER",
                path=str(target),
            )
        if refuse_kind(target) and not force:
            raise UsageError(
                f"{target} exists; choose another name, or write over it with --force (force=True).",
                rule="U-EXISTS",
                path=str(target),
            )
        longest = os.pathconf(target.parent, "PC_NAME_MAX") - _TEMPORARY
        if len(os.fsencode(target.name)) > longest:
            raise unwritable(target, f"its name is longer than {longest} bytes")
        with tempfile.TemporaryFile(dir=target.parent):
            return target
    except TracekitError:
        raise
    except (OSError, ValueError) as error:
        raise unwritable(target, (getattr(error, "strerror", None) or str(error)).lower()) from error


def refuse_kind(target: Path) -> bool:
    """Return whether there is a file at a target.

    Raises:
        TraceUnwritable: F-KIND, there is something else.
        OSError: the system does not say.
    """
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise TraceUnwritable(
            f"{target} is {kind_of(mode)}, which a trace does not replace; choose another name.",
            rule="F-KIND",
            path=str(target),
        )
    return True


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
