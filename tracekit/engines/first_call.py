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

from tracekit.engines.process import Recordings, share_of_environment
from tracekit.env import Settings
from tracekit.model import Share
from tracekit.recorder.session import Session

_MARK = "__tracekit__"
Attach = Callable[[Session, Any], AbstractContextManager[object]]


def record_calls(
    kind: Any, attach: Attach, found: Settings, place: Callable[[Any, Share | None], Share | None]
) -> None:
    """Stand before the calls of a class of modules; once.

    Args:
        kind: a class that inherits `torch.nn.Module`.
        attach: hooks a session into a model.
        found: where to, and what is wanted.
        place: says which part of the job a model is, given what the environment says.
    """
    original = kind.__call__
    if hasattr(original, _MARK):
        return
    recordings = Recordings(found)
    known: weakref.WeakSet[Any] = weakref.WeakSet()
    inside = threading.local()

    def begin(model: Any) -> None:
        def join(session: Session, stack: ExitStack) -> None:
            stack.enter_context(attach(session, model))

        recordings.begin(join, place(model, share_of_environment(os.environ)))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Models are made of models; the outermost is the one that sees tokens.
        if getattr(inside, "model", False):
            return original(self, *args, **kwargs)
        inside.model = True
        try:
            if self not in known:
                known.add(self)
                begin(self)
            return original(self, *args, **kwargs)
        finally:
            inside.model = False

    setattr(call, _MARK, True)
    kind.__call__ = call
