"""Public conformance suites, and small calls in memory. `tracekit.testing.strategies` needs hypothesis."""

from tracekit.testing.build import MemoryTrace, dense_call, record, sparse_call, with_d_out
from tracekit.testing.provider_suite import ProviderSuite
from tracekit.testing.relation_suite import RelationSuite

__all__ = [
    "MemoryTrace",
    "ProviderSuite",
    "RelationSuite",
    "dense_call",
    "record",
    "sparse_call",
    "with_d_out",
]
