"""Checkpoints that are made once: a folder under `TRACEKIT_CACHE` is there complete or not at all."""

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tracekit.env import settings


def prepared(name: str, write: Callable[[Path], None], told: str = "") -> Path:
    """Return the folder of a checkpoint, written at the first use.

    Args:
        name: of the folder, different where its content is.
        write: writes the checkpoint into an empty folder.
        told: what is told on stderr before that, where it takes long.
    """
    target = settings().cache / name
    if not (target / "config.json").is_file():
        if told:
            print(f"tracekit: {told} into {target}", file=sys.stderr)
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=target.parent))
        try:
            write(work)
            move_into_place(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def move_into_place(work: Path, target: Path) -> None:
    """Rename a finished folder to its name; where another process was first, its folder stays."""
    try:
        work.rename(target)
    except OSError:
        if not (target / "config.json").is_file():
            raise
