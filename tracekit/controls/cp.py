"""Fault: partials are exchanged, and accumulated, in bfloat16.

After RL-Kernel's probes `accum_dtype` and `early_downcast`: close enough for a tolerance, and other bits.
"""

from tracekit.controls.ranks import SplitTwin
from tracekit.model import Array, Bits, DType
from tracekit.providers import tka1
from tracekit.providers.ranks import Arrived, merge_by_key


class Bfloat16Partials(SplitTwin):
    """A job whose ranks send their partials in bfloat16."""

    id = "twin-cp"
    fault = "partials are rounded to bfloat16 before they merge"

    def merge(self, arrived: Arrived, sink: Array | None, dtype: DType) -> tka1.Outputs:
        """Merge partials that went through bfloat16."""
        short = [(run, tka1.Partials(_short(p.acc), _short(p.l), p.m)) for run, p in arrived]
        return merge_by_key(short, sink, dtype)


def _short(bits: Array) -> Array:
    wide = Bits(bits, DType.FLOAT32).to_float32()
    return Bits.from_float32(wide, DType.BFLOAT16).data.astype(bits.dtype) << 16
