"""What the numbers of a call mean: things that two kernels may define differently."""

import struct
from dataclasses import dataclass
from enum import StrEnum

from tracekit.errors import InvalidCall
from tracekit.model.bits import DType


class LseBase(StrEnum):
    """Base of the logarithm of a log-sum-exp."""

    NATURAL = "natural"
    TWO = "2"


class EmptyLse(StrEnum):
    """LSE of a row that has no key."""

    NEGATIVE_INFINITY = "-inf"
    POSITIVE_INFINITY = "+inf"
    SINK = "sink"


class KVSource(StrEnum):
    """Where the KV rows were seen.

    `consumed` is read back from what the kernel read; `written` was seen when it was written, so it
    says nothing about pages and caches.
    """

    CONSUMED = "consumed"
    WRITTEN = "written"


@dataclass(frozen=True)
class Conventions:
    """The declared meaning of the numbers of one call.

    Args:
        scale_bits: binary32 bits of the factor on q.k.
        causal: whether a row may only read KV rows that exist at its position.
        window: sliding window in tokens (a row reads its own position and `window - 1` before it).
        lse_base: base of the LSE.
        sink_in_lse: whether the LSE counts the sink.
        empty_lse: LSE of a row without keys.
        output_boundary: what O is, such as `attention core` or `before inverse rope`.
        score_dtype: dtype in which q.k, scaled and masked, is held before the exponential.
        probability_dtype: dtype of P when it meets V; the `u` of the envelope (docs/verdicts.md).
        kv_source: where the KV rows were seen; the weaker claim, unless an adapter reads them back.

    Raises:
        InvalidCall: `M-CONV-SCALE`, `M-CONV-WINDOW`.
    """

    scale_bits: int
    causal: bool = True
    window: int | None = None
    lse_base: LseBase = LseBase.NATURAL
    sink_in_lse: bool = False
    empty_lse: EmptyLse = EmptyLse.NEGATIVE_INFINITY
    output_boundary: str = "attention core"
    score_dtype: DType = DType.FLOAT32
    probability_dtype: DType = DType.FLOAT32
    kv_source: KVSource = KVSource.WRITTEN

    def __post_init__(self) -> None:
        if not 0 <= self.scale_bits < 2**32 or not 0.0 < self.scale < float("inf"):
            raise InvalidCall(
                f"the scale is the bits of a positive binary32, not {self.scale_bits:#x}.",
                rule="M-CONV-SCALE",
            )
        if self.window is not None and self.window < 1:
            raise InvalidCall(f"a window holds at least one token, not {self.window}.", rule="M-CONV-WINDOW")

    @property
    def scale(self) -> float:
        """The value of `scale_bits`."""
        return float(struct.unpack("<f", struct.pack("<I", self.scale_bits))[0])


def scale_to_bits(scale: float) -> int:
    """Return the binary32 bits of a scale, rounded to nearest."""
    return int(struct.unpack("<I", struct.pack("<f", scale))[0])
