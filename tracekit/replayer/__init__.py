"""Run kernels again in child processes and say which promises they keep.

Everything is imported at first use: each child is a module of this package, and needs little of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.replayer.report import Report as Report
    from tracekit.replayer.run import Progress as Progress
    from tracekit.replayer.run import replay as replay
    from tracekit.replayer.trace import TraceLike as TraceLike

_HOMES = {"Report": "report", "Progress": "run", "replay": "run", "TraceLike": "trace"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tracekit.replayer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tracekit.replayer.{_HOMES[name]}"), name)
