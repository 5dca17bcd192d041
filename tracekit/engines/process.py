"""The recordings of a process that TRACEKIT_RECORD told to record: opened, named, written at its end.

`run.h5` becomes `run.rank0-PID.h5`. While a recording runs, `run.rank0-PID.h5.started` stands beside it; the
file goes when the trace is written, and otherwise says why it was not, so that a process that died is seen.
"""

import os
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from tracekit.engines.terminated import forget, save_when_terminated
from tracekit.env import Settings, settings
from tracekit.errors import TracekitError
from tracekit.model import Share
from tracekit.recorder.api import record
from tracekit.recorder.job import STARTED
from tracekit.recorder.session import Session
from tracekit.store import write_trace

_WRITE = partial(write_trace, threads=1)
"""At the end of a Python program no thread can be started any more."""
_BEFORE_EXIT = 100
"""Finalizers of the process run from the highest priority down, its queues and locks last."""


def enabled(engine: str) -> Settings | None:
    """Return the settings where this process is to record an engine; says what is wrong with them."""
    try:
        found = settings()
    except TracekitError as error:
        say(f"nothing is recorded: {error}")
        return None
    return found if found.record is not None and found.engine in (None, engine) else None


def share_of_environment(environ: Mapping[str, str]) -> Share | None:
    """Return the place that torchrun gives a process; data-parallel, until an engine knows more."""
    try:
        rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return Share(rank, world, rank, world) if 0 <= rank < world else None


@dataclass(frozen=True, eq=False)
class _Running:
    """A recording that runs in process `pid`; a child forked from it has a copy, and writes nothing."""

    stack: ExitStack
    session: Session
    path: Path
    marker: Path
    pid: int
    gone: Callable[[], bool]
    """Whether what is recorded is no more."""


class Recordings:
    """The recordings of this process, one a model.

    A recording ends with the process, or when its model is gone and the next one begins: not in the moment of
    the model's end, which may lie in the middle of anything, another trace's writing included.

    Args:
        found: where to, and what is wanted.
    """

    def __init__(self, found: Settings) -> None:
        assert found.record is not None
        self._base = found.record
        self._filters = found.filters
        self._count = 0
        self._running: dict[Finalize[Any], _Running] = {}
        os.register_at_fork(after_in_child=self._forked)

    def begin(
        self, join: Callable[[Session, ExitStack], None], share: Share | None, model: object = None
    ) -> bool:
        """Begin a recording, and say whether it runs.

        Args:
            join: hooks into the engine; what it enters on the stack is left before the trace is written.
            share: which part of a job this process is.
            model: what is recorded, held weakly; None where that stays until the process ends.
        """
        self._end_those_gone()
        path, marker = self._next_path(share)
        stack = ExitStack()
        try:
            _claim(marker, "its process ended before the trace was written")
            options: dict[str, Any] = {**self._filters, "share": share}
            session = stack.enter_context(record(path, write=_WRITE, **options))
            rank = 0 if share is None else share.rank
            session.notes |= {"rank": str(rank), "pid": str(os.getpid())}
            join(session, stack)
            session.share = session.share or share
        except Exception as error:
            say(f"{path} is not recorded: {error}")
            with suppress(OSError):
                marker.write_text(str(error))
            return False
        gone = _never if model is None else partial(_is_gone, weakref.ref(model))
        running = _Running(stack, session, path, marker, os.getpid(), gone)
        self._running[Finalize(None, _save, args=(running,), exitpriority=_BEFORE_EXIT)] = running
        save_when_terminated(running, partial(_terminate, running))
        return True

    def lose(self, reason: str) -> None:
        """Tell that something of this process is not recorded: to its user, and to who gathers the traces."""
        say(reason)
        _, marker = self._next_path(share_of_environment(os.environ))
        with suppress(OSError):
            _claim(marker, reason)

    def _forked(self) -> None:
        """In a child: what it runs of a model whose recording its parent began is in no trace."""
        for running in self._running.values():
            running.session.astray = partial(
                self.lose,
                "a process was forked after its model had begun to be recorded, and what the model ran in it "
                "is in no trace; fork before the model's first call, or spawn",
            )

    def _next_path(self, share: Share | None) -> tuple[Path, Path]:
        """Return where the next trace is written, and its marker.

        Another program may have had the number of this process: one that became this one by exec, or a
        process of another container. What it has left there stays.
        """
        rank = 0 if share is None else share.rank
        while True:
            self._count += 1
            number = f"-{self._count}" if self._count > 1 else ""
            stem, suffix = self._base.stem, self._base.suffix
            path = self._base.with_name(f"{stem}.rank{rank}-{os.getpid()}{number}{suffix}")
            marker = path.with_name(path.name + STARTED)
            if not (path.exists() or marker.exists()):
                return path, marker

    def _end_those_gone(self) -> None:
        for finalize in [finalize for finalize, running in self._running.items() if running.gone()]:
            finalize()
            del self._running[finalize]


def _claim(marker: Path, text: str) -> None:
    """Write the marker of a trace.

    Raises:
        FileExistsError: another process was faster.
    """
    with marker.open("x") as file:
        file.write(text)


def _terminate(running: _Running) -> None:
    """Write what there is before SIGTERM ends the process; a child that was forked has a copy only."""
    if running.pid == os.getpid():
        running.session.interrupt("ended by SIGTERM")
        _save(running)


def _save(running: _Running) -> None:
    """Write the trace when the process ends, whatever ended it; once.

    The marker stays where closing raised: the trace of contradicted conventions is written, and whoever
    gathers the traces must tell what is wrong with it.
    """
    if running.pid != os.getpid() or not running.marker.exists():
        return
    forget(running)
    try:
        running.stack.close()
    except Exception as error:
        say(f"{running.path}: {error}")
        with suppress(OSError):
            running.marker.write_text(str(error))
        return
    running.marker.unlink(missing_ok=True)


def _never() -> bool:
    return False


def _is_gone(model: "weakref.ref[Any]") -> bool:
    return model() is None


def say(text: str) -> None:
    """Tell the user of a program that is not ours; one that has closed its stderr is not told."""
    with suppress(OSError, ValueError):
        print(f"tracekit: {text}", file=sys.stderr, flush=True)
