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
from functools import wraps
from typing import TYPE_CHECKING, Any

from tracekit.env import settings
from tracekit.errors import TracekitError, Unsupported

if TYPE_CHECKING:
    from tracekit.engines.process import Recordings
    from tracekit.model import Tag
    from tracekit.recorder.session import Session

_MARK = "__tracekit__"


def register() -> None:
    """Do in this process what TRACEKIT_BACKEND and TRACEKIT_RECORD say.

    Raises:
        UsageError: a setting is wrong and TRACEKIT_BACKEND is set: no engine runs its own kernel where
            another one was asked for.
    """
    try:
        found = settings()
    except TracekitError as error:
        if "TRACEKIT_BACKEND" in os.environ:
            raise
        _say(f"nothing is recorded: {error}")
        return
    if found.backend is not None:
        from tracekit.engines import vllm_backend

        vllm_backend.register()
    if found.record is None or found.engine not in (None, "vllm"):
        return
    try:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    except ImportError as error:
        _say(f"nothing is recorded: vLLM has no GPUModelRunner any more ({error})")
        return
    if hasattr(GPUModelRunner.execute_model, _MARK):
        return
    from tracekit.engines.process import Recordings

    runners = Runners(Recordings(found))
    GPUModelRunner.execute_model = _wrapped(GPUModelRunner.execute_model, runners)
    _watch_cores(runners)
    if hasattr(GPUModelRunner, "_dummy_run"):
        GPUModelRunner._dummy_run = _counted(GPUModelRunner._dummy_run, runners)


class Runners:
    """The model runners of this process, each recorded from its first step on.

    Args:
        recordings: of this process.
    """

    def __init__(self, recordings: "Recordings") -> None:
        self._recordings = recordings
        self._seen: set[int] = set()
        self.dummies: list[Tag] = []
        """Forwards over made-up tokens so far: profiling, warm-up for compilation, graph capture."""
        self.core: Any = None
        """The engine core that stepped last in this process."""

    def join(self, runner: Any) -> Callable[..., Any] | None:
        """Begin to record a runner that was not seen before, and return its wrapped `execute_model`.

        What goes wrong is said, and stands in the file beside the trace that is missing; the engine goes on.
        """
        if id(runner) in self._seen:
            return None
        self._seen.add(id(runner))
        try:
            return self._begin(runner)
        except Exception as error:
            _say(f"an engine is not recorded: {error!r}")
            return None

    def _begin(self, runner: Any) -> Callable[..., Any] | None:
        from tracekit.engines.patch import enter_all
        from tracekit.engines.vllm import Recorder
        from tracekit.engines.vllm_points import share_of

        share, unplaced = None, None
        try:
            share = share_of(runner)
        except Exception as error:
            unplaced = Unsupported(f"its place in the job could not be read: {error!r}", rule="V-SHARE")

        def hook(session: "Session", stack: ExitStack) -> None:
            if unplaced is not None:
                raise unplaced
            for tag in self.dummies:
                session.other(tag)
            enter_all(stack, Recorder(session, runner, self.core).entries(), [])

        if not self._recordings.begin(hook, share):
            return None
        wrapped: Callable[..., Any] = runner.execute_model
        return wrapped


def _wrapped(original: Callable[..., Any], runners: Runners) -> Callable[..., Any]:
    @wraps(original)  # the recorder reads the arguments by the names of the original
    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        joined = runners.join(self)
        return original(self, *args, **kwargs) if joined is None else joined(*args, **kwargs)

    setattr(execute_model, _MARK, True)
    return execute_model


def _watch_cores(runners: Runners) -> None:
    """Take note of the engine core that steps: what happens between its steps belongs to the history."""
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return  # the history then says why it is lost

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            runners.core = self
            return original(self, *args, **kwargs)

        return step

    for name in ("step", "step_with_batch_queue"):
        if hasattr(EngineCore, name):
            setattr(EngineCore, name, watched(getattr(EngineCore, name)))


def _counted(original: Callable[..., Any], runners: Runners) -> Callable[..., Any]:
    from tracekit.engines.vllm_points import run_tag

    def dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        runners.dummies.append(run_tag(kwargs))
        return original(self, *args, **kwargs)

    return dummy_run


def _say(text: str) -> None:
    print(f"tracekit: {text}", file=sys.stderr, flush=True)
