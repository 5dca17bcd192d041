"""tracekit: golden-trace record and replay for LLM attention, in bits.

`record`, `merge`, `open`, `replay`, `diff`, `bind` and `verify` are the command line's verbs as functions;
everything is imported at first use, so that `import tracekit` costs nothing and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tracekit.api import bind as bind
    from tracekit.api import diff as diff
    from tracekit.api import history as history
    from tracekit.api import merge as merge
    from tracekit.api import open as open
    from tracekit.api import record as record
    from tracekit.api import replay as replay
    from tracekit.api import verify as verify
    from tracekit.contract import bind_attention_runtime_readbacks as bind_attention_runtime_readbacks
    from tracekit.gate import RequestGate as RequestGate
    from tracekit.model import events as events
    from tracekit.verdict import Status as Status
    from tracekit.verdict import Verdict as Verdict

_HOMES = {
    "RequestGate": "tracekit.gate",
    "bind_attention_runtime_readbacks": "tracekit.contract",
    "events": "tracekit.model",
    **dict.fromkeys(
        ("bind", "diff", "history", "merge", "open", "record", "replay", "verify"), "tracekit.api"
    ),
    **dict.fromkeys(("Status", "Verdict"), "tracekit.verdict"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tracekit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
