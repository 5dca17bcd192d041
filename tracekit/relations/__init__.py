"""One file per claim: make variants of calls, map answers back. Runs nothing and compares nothing."""

from tracekit.relations.base import Expectation, Relation, Variant, rng
from tracekit.relations.registry import claims, relation

__all__ = ["Expectation", "Relation", "Variant", "claims", "relation", "rng"]
