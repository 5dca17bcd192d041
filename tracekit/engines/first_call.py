"""Records every model of a kind that this process calls, from its first call on.

For engines without a plug-in mechanism of their own: `startup/sitecustomize.py` calls the plug-in of an
engine when its models have been imported, and the plug-in stands before their calls.
"""

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from tracekit.engines.process import Recordings, share_of_environment
from tracekit.env import Settings
from tracekit.model import Share
from tracekit.recorder.session import Session

_MARK = "__tracekit__"
_COMPILED = (
    "a model ran inside torch.compile, where no hook is called, and is not recorded; run it without "
    "(TORCH_COMPILE_DISABLE=1)"
)
Attach = Callable[[Session, Any], AbstractContextManager[object]]


def record_calls(
    kind: Any, attach: Attach, found: Settings, place: Callable[[Any, Share | None], Share | None]
) -> None:
    """Stand before the calls of a class of modules; once. Nothing that goes wrong here reaches the caller.

    Args:
        kind: a class that inherits `torch.nn.Module`.
        attach: hooks a session into a model.
        found: where to, and what is wanted.
        place: says which part of the job a model is, given what the environment says.
    """
    original = kind.__call__
    if hasattr(original, _MARK):
        return
    models = _Models(Recordings(found), attach, place)
    inside = threading.local()

    # torch runs this when it traces a call, once; what it traces can call nothing of Python.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def compiled() -> bool:
        models.lose(_COMPILED)
        return True

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            compiled()
            return original(self, *args, **kwargs)
        # Models are made of models; the outermost is the one that sees tokens.
        if getattr(inside, "model", False):
            return original(self, *args, **kwargs)
        inside.model = True
        try:
            models.see(self)
            return original(self, *args, **kwargs)
        finally:
            inside.model = False

    setattr(call, _MARK, True)
    kind.__call__ = call


class _Models:
    """The models of this process that were called so far, each recorded or told why not.

    Args:
        recordings: of this process.
        attach: hooks a session into a model.
        place: says which part of the job a model is.
    """

    def __init__(
        self,
        recordings: Recordings,
        attach: Attach,
        place: Callable[[Any, Share | None], Share | None],
    ) -> None:
        self._recordings = recordings
        self._attach = attach
        self._place = place
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._told: set[str] = set()
        # A second thread waits until the model is recorded, and is then refused or not by its recorder.
        self._lock = threading.RLock()

    def see(self, model: Any) -> None:
        """Begin to record a model that was not called before."""
        if model in self._known:
            return
        with self._lock:
            if model in self._known:
                return
            self._known.add(model)
            try:
                self._begin(model)
            except Exception as error:
                self.lose(f"{type(model).__name__} is not recorded: {error!r}")

    def lose(self, reason: str) -> None:
        """Tell that something is not recorded, once."""
        if reason not in self._told:
            self._told.add(reason)
            self._recordings.lose(reason)

    def _begin(self, model: Any) -> None:
        attach = self._attach
        reference = weakref.ref(model)

        def join(session: Session, stack: ExitStack) -> None:
            stack.enter_context(attach(session, reference()))

        self._recordings.begin(join, self._place(model, share_of_environment(os.environ)), model)
