"""Indexers that can be run again: their protocol and their names."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tracekit.errors import UsageError
from tracekit.model import Bits, ExecutedIdentity, IndexerCall, Lists
from tracekit.providers.base import Execution
from tracekit.verdict import ClaimId

REFERENCE = "indexer-ref"
BUILTIN: Mapping[str, str] = {
    REFERENCE: "tracekit.providers.indexer_ref:IndexerRef",
    "transformers-indexer": "tracekit.providers.transformers_indexer:TransformersIndexer",
    "vllm-dsv4-indexer": "tracekit.providers.vllm_dsv4_indexer:VllmDsv4Indexer",
}
"""Indexer id -> `module:factory`; the module is imported only when the indexer is made."""

KERNELS: Mapping[str, str] = {
    "transformers.deepseek_v4.indexer": "transformers-indexer",
    "transformers.deepseek_v32.indexer": "transformers-indexer",
    "vllm.dsv4_indexer_cpu": "vllm-dsv4-indexer",
}
"""Recorded indexer -> the one that runs it again."""


@dataclass(frozen=True, eq=False)
class IndexerLaunch:
    """What an indexer is asked to run: calls one after the other in one process, and how."""

    calls: tuple[IndexerCall, ...]
    execution: Execution = field(default_factory=Execution)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The answer to one call.

    Args:
        top_k: the keys that each row chose, in order.
        scores: FP32 `[n]`, one a chosen key.
    """

    top_k: Lists
    scores: Bits


@dataclass(frozen=True, eq=False)
class IndexerAnswer:
    """The answers to the calls of a launch, and what really ran."""

    chosen: tuple[Chosen, ...]
    executed: ExecutedIdentity


@runtime_checkable
class IndexerProvider(Protocol):
    """An indexer that can be run again; reads query, weights and keys of a call, never its choice."""

    id: str

    def advertised(self) -> frozenset[ClaimId]:
        """Return the claims that it promises; the others are only probed."""
        ...

    def identity(self) -> ExecutedIdentity:
        """Return what would run here."""
        ...

    def refuses(self, call: IndexerCall) -> str | None:
        """Return why it cannot run a call, in one clause, or None."""
        ...

    def run(self, launch: IndexerLaunch) -> IndexerAnswer:
        """Run the calls of a launch.

        Raises:
            Unsupported: a call is refused.
        """
        ...


def create(name: str) -> IndexerProvider:
    """Make an indexer by its name in `BUILTIN`.

    Raises:
        UsageError: `P-UNKNOWN`.
        Unavailable: what it needs is not installed.
    """
    if name not in BUILTIN:
        raise UsageError(
            f"there is no indexer {name!r}; there are {', '.join(BUILTIN)}.", rule="P-UNKNOWN", provider=name
        )
    module, _, attribute = BUILTIN[name].partition(":")
    made: IndexerProvider = getattr(importlib.import_module(module), attribute)()
    return made
