"""The protocol of a claim about an indexer, and the claims that there are."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from tracekit.model import Array, IndexerCall
from tracekit.providers.indexers import IndexerLaunch, IndexerProvider
from tracekit.relations.base import Expectation
from tracekit.verdict import ClaimId


@dataclass(frozen=True, eq=False)
class IndexerVariant:
    """One legal re-arrangement of a call; its calls hold every row once."""

    name: str
    launch: IndexerLaunch


@runtime_checkable
class IndexerRelation(Protocol):
    """One promise about the choices of an indexer."""

    id: ClassVar[ClaimId]
    promise: ClassVar[str]
    expects: ClassVar[Expectation]

    def subjects(self, call: IndexerCall) -> Iterator[IndexerCall]:
        """Yield the calls whose answers are compared with those of their variants."""
        ...

    def applies(self, call: IndexerCall) -> str | None:
        """Return why the claim says nothing about a call, in one clause, or None where it applies."""
        ...

    def variants(self, call: IndexerCall, seed: int) -> Iterator[IndexerVariant]:
        """Yield the variants; the same seed gives the same variants."""
        ...

    def broken(self) -> IndexerProvider:
        """Return the negative control."""
        ...


def until_visible(call: IndexerCall, rows: Array) -> IndexerCall:
    """Return the call with some rows, over only the keys that exist at the last of them."""
    part = call.take(rows)
    ends = np.zeros(len(part.rows.requests), np.int64)
    np.maximum.at(ends, part.rows.request, part.visible)
    pairs = zip(part.rows.requests, ends.tolist(), strict=True)
    return replace(part, keys={key: part.keys[key].part(slice(end)) for key, end in pairs})


def cut(call: IndexerCall, size: int) -> IndexerLaunch:
    """Return every `size` rows of each request as a call of their own, in order of positions."""
    order = np.lexsort((call.rows.positions, call.rows.request))
    requests = call.rows.request[order]
    parts = [
        rows[start : start + size]
        for index in range(len(call.rows.requests))
        for rows in (order[requests == index],)
        for start in range(0, rows.size, size)
    ]
    return IndexerLaunch(tuple(until_visible(call, rows) for rows in parts))


def claims() -> Mapping[ClaimId, Callable[[], IndexerRelation]]:
    """Return the claims about indexers, in the order of reports."""
    from tracekit.relations.indexer_chunks import IndexerChunks
    from tracekit.relations.indexer_rows import IndexerRows
    from tracekit.relations.ties import Ties

    return {made.id: made for made in (IndexerRows, IndexerChunks, Ties)}
