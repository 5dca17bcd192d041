"""Fault: as in `host_graph`, for captures on a device."""

from tracekit.controls.host_graph import StalePlan


class StaleDevicePlan(StalePlan):
    """A kernel that reads, at every replay, by the lengths of the capture."""

    id = "twin-graph"
