"""`graph`: a launch in a CUDA or HIP graph gives the eager bits when it is replayed."""

from dataclasses import dataclass
from typing import ClassVar

from tracekit.controls.graph import StaleDevicePlan
from tracekit.providers.base import Provider
from tracekit.providers.graphs.kind import GraphKind
from tracekit.relations.host_graph import Replayed


@dataclass(frozen=True)
class DeviceGraph(Replayed):
    """A graph is a launch: nothing but its inputs decides its bits."""

    id: ClassVar[str] = "graph"
    kind: ClassVar[GraphKind] = GraphKind.DEVICE
    nowhere: ClassVar[str] = "launches of the kernel cannot be captured: it needs a CUDA or HIP device"
    promise: ClassVar[str] = "a captured launch, replayed on other inputs, gives the eager bits"

    def broken(self) -> Provider:
        """Return a kernel whose plan stays that of the capture."""
        return StaleDevicePlan()
