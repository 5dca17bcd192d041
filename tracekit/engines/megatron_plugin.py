"""Records the Megatron-core models of this process, where TRACEKIT_RECORD is set; see `first_call`."""

from contextlib import AbstractContextManager
from typing import Any

from tracekit.engines.first_call import record_calls
from tracekit.engines.process import enabled
from tracekit.recorder.session import Session


def register() -> None:
    """Stand before the calls of language models, if TRACEKIT_RECORD says so."""
    found = enabled("megatron")
    if found is None:
        return
    from megatron.core.models.common.language_module.language_module import LanguageModule

    # The adapter knows the place in the job better than the environment does.
    record_calls(LanguageModule, _attach, found, lambda _, share: share)


def _attach(session: Session, model: Any) -> AbstractContextManager[object]:
    from tracekit.engines.megatron import attach

    return attach(session, model=model)
