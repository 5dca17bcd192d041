"""Run kernels again in child processes and say which promises they keep."""

from tracekit.replayer.report import Report
from tracekit.replayer.run import Progress, replay
from tracekit.replayer.trace import TraceLike

__all__ = ["Progress", "Report", "TraceLike", "replay"]
