"""vLLM's plug-in: records every process that runs a model, when TRACEKIT_RECORD is set; runs attention on
TKA-1, when TRACEKIT_BACKEND says so; else does nothing.

vLLM calls `register` in each of its processes, and in some of them more than once. The engine's own process,
which may be a child, is the one that records: `run.h5` becomes `run.rank0-PID.h5`, written when the process
ends.
"""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from tracekit.env import settings
from tracekit.errors import TracekitError

_MARK = "__tracekit__"
_BEFORE_EXIT = 100
"""Finalizers of the process run from the highest priority down, its queues and locks last."""


def register() -> None:
    """Do in this process what TRACEKIT_BACKEND and TRACEKIT_RECORD say.

    Raises:
        UsageError: a setting is wrong and TRACEKIT_BACKEND is set: no engine runs its own kernel where
            another one was asked for.
    """
    try:
        path, backend = settings().record, settings().backend
    except TracekitError as error:
        if "TRACEKIT_BACKEND" in os.environ:
            raise
        _say(f"nothing is recorded: {error}")
        return
    if backend is not None:
        from tracekit.engines import vllm_backend

        vllm_backend.register()
    if path is None:
        return
    try:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    except ImportError as error:
        _say(f"nothing is recorded: vLLM has no GPUModelRunner any more ({error})")
        return
    if hasattr(GPUModelRunner.execute_model, _MARK):
        return
    recordings = Recordings(path)
    GPUModelRunner.execute_model = _wrapped(GPUModelRunner.execute_model, recordings)
    if hasattr(GPUModelRunner, "_dummy_run"):
        GPUModelRunner._dummy_run = _counted(GPUModelRunner._dummy_run, recordings)


class Recordings:
    """The recordings of this process: one a model runner, opened at its first step.

    Args:
        path: as the user gave it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[int] = set()
        self.dummies = 0
        """Forwards over made-up tokens so far: profiling, warm-up for compilation, graph capture."""

    def join(self, runner: Any) -> Callable[..., Any] | None:
        """Begin to record a runner that was not seen before, and return its wrapped `execute_model`."""
        if id(runner) in self._seen:
            return None
        self._seen.add(id(runner))
        from tracekit.engines.patch import enter_all
        from tracekit.engines.vllm import Recorder
        from tracekit.recorder.api import record

        rank = int(getattr(runner.parallel_config, "rank", 0))
        number = f"-{len(self._seen)}" if len(self._seen) > 1 else ""
        path = self._path.with_name(f"{self._path.stem}.rank{rank}-{os.getpid()}{number}{self._path.suffix}")
        stack = ExitStack()
        try:
            session = stack.enter_context(record(path))
            session.notes |= {"rank": str(rank), "pid": str(os.getpid())}
            session.notes["warm-up"] = f"{self.dummies} dummy runs before the first step, none recorded"
            enter_all(stack, Recorder(session, runner).entries(), [])
        except Exception as error:
            _say(f"{path} is not recorded: {error}")
            return None
        Finalize(None, _save, args=(stack, path), exitpriority=_BEFORE_EXIT)
        wrapped: Callable[..., Any] = runner.execute_model
        return wrapped


def _wrapped(original: Callable[..., Any], recordings: Recordings) -> Callable[..., Any]:
    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        joined = recordings.join(self)
        return original(self, *args, **kwargs) if joined is None else joined(*args, **kwargs)

    setattr(execute_model, _MARK, True)
    return execute_model


def _counted(original: Callable[..., Any], recordings: Recordings) -> Callable[..., Any]:
    def dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        recordings.dummies += 1
        return original(self, *args, **kwargs)

    return dummy_run


def _save(stack: ExitStack, path: Path) -> None:
    """Write the trace when the process ends, whatever ended it."""
    try:
        stack.close()
    except Exception as error:
        _say(f"{path} was not written: {error}")


def _say(text: str) -> None:
    print(f"tracekit: {text}", file=sys.stderr, flush=True)
