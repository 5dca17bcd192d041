"""Where launches are captured."""

from enum import StrEnum


class GraphKind(StrEnum):
    """Who freezes launches: torch on a CUDA or HIP device, or the stand-in for calls of a CPU kernel."""

    DEVICE = "device"
    HOST = "host"
