"""Records the transformers models of this process, where TRACEKIT_RECORD is set; see `first_call`."""

from contextlib import AbstractContextManager
from typing import Any

from tracekit.engines.first_call import record_calls
from tracekit.engines.process import enabled
from tracekit.model import Share
from tracekit.recorder.session import Session


def register() -> None:
    """Stand before the calls of models, if TRACEKIT_RECORD says so."""
    found = enabled("transformers")
    if found is None:
        return
    from transformers import PreTrainedModel

    record_calls(PreTrainedModel, _attach, found, tensor_share)


def _attach(session: Session, model: Any) -> AbstractContextManager[object]:
    from tracekit.engines.transformers import attach

    return attach(session, model=model)


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
