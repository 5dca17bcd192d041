"""The trace of three calls that the tests of verdicts share."""

from tracekit.providers.registry import create
from tracekit.testing import MemoryTrace, dense_call, record, sparse_call

TKA1 = create("tka1")
PREFILL = record(dense_call(lengths=(12, 7), seed=1), TKA1)
DECODE = record(dense_call(lengths=(12, 7, 9), new=(1, 1, 1), sink=True, layer=1, step=1, seed=2), TKA1)
SPARSE = record(sparse_call(lengths=(24, 13), seed=3), TKA1)
TRACE = MemoryTrace((PREFILL, DECODE, SPARSE), name="three.h5")
