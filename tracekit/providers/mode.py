"""How the processor rounds: a hidden input of every kernel."""

from enum import StrEnum


class FloatMode(StrEnum):
    """What a library may leave behind in the thread that launches."""

    FLUSHED = "denormals flushed to zero"
    TOWARD_ZERO = "rounding toward zero"
