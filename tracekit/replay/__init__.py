"""Run kernels again in child processes and say which promises they keep."""

from tracekit.replay.report import Report
from tracekit.replay.run import Progress, replay
from tracekit.replay.trace import TraceLike

__all__ = ["Progress", "Report", "TraceLike", "replay"]
