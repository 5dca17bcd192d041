"""The trace file (docs/format.md): write, open, verify."""

from tracekit.store.heads import CallHead, IndexerHead
from tracekit.store.reader import Trace, open_trace
from tracekit.store.rules import Violation
from tracekit.store.summary import TraceSummary
from tracekit.store.verify import verify_trace
from tracekit.store.writer import write_trace

__all__ = [
    "CallHead",
    "IndexerHead",
    "Trace",
    "TraceSummary",
    "Violation",
    "open_trace",
    "verify_trace",
    "write_trace",
]
