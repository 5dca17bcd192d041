"""Hold answers against what was expected: in bits, in ULPs, in an error envelope. Runs nothing."""

from tracekit.compare.bits import Comparison, compare_bits
from tracekit.compare.bounded import Bounded, compare_envelope
from tracekit.compare.diagnose import diagnose
from tracekit.compare.envelope import Envelope, Roundings, envelope

__all__ = [
    "Bounded",
    "Comparison",
    "Envelope",
    "Roundings",
    "compare_bits",
    "compare_envelope",
    "diagnose",
    "envelope",
]
