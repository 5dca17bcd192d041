"""Records every transformers model of this process from its first call on, where TRACEKIT_RECORD is set.

Called by `startup/sitecustomize.py` when transformers' models have been imported.
"""

import os
import threading
import weakref
from contextlib import ExitStack
from typing import Any

from tracekit.engines.process import Recordings, enabled, share_of_environment
from tracekit.model import Share
from tracekit.recorder.session import Session

_MARK = "__tracekit__"


def register() -> None:
    """Stand before the calls of models, if TRACEKIT_RECORD says so."""
    found = enabled("transformers")
    if found is None:
        return
    from transformers import PreTrainedModel

    if hasattr(PreTrainedModel.__call__, _MARK):
        return
    PreTrainedModel.__call__ = _wrapped(PreTrainedModel.__call__, Recordings(found))


def _wrapped(original: Any, recordings: Recordings) -> Any:
    known: weakref.WeakSet[Any] = weakref.WeakSet()
    inside = threading.local()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Models are made of models; the outermost is the one that sees tokens.
        if getattr(inside, "model", False):
            return original(self, *args, **kwargs)
        inside.model = True
        try:
            if self not in known:
                known.add(self)
                _begin(recordings, self)
            return original(self, *args, **kwargs)
        finally:
            inside.model = False

    setattr(call, _MARK, True)
    return call


def _begin(recordings: Recordings, model: Any) -> None:
    from tracekit.engines.transformers import attach

    def join(session: Session, stack: ExitStack) -> None:
        stack.enter_context(attach(session, model=model))

    recordings.begin(join, tensor_share(model, share_of_environment(os.environ)))


def tensor_share(model: Any, share: Share | None) -> Share | None:
    """Return the place of a process whose model transformers has cut by heads (`tp_plan="auto"`)."""
    size = int(getattr(model, "_tp_size", None) or 1)
    if share is None or size < 2 or share.world % size:
        return share
    kv_heads = int(getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads)
    return Share(
        share.rank,
        share.world,
        share.rank // size,
        share.world // size,
        share.rank % size,
        size,
        kv_heads,
    )
