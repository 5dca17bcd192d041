"""`chunks`, of an indexer: a prefill cut into chunks chooses what the prefill in one piece chooses."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from tracekit.controls.indexers import FirstChunkOnly
from tracekit.model import IndexerCall
from tracekit.providers.indexers import IndexerProvider
from tracekit.relations.base import Expectation
from tracekit.relations.chunks import SIZES
from tracekit.relations.indexers import IndexerVariant, cut


class IndexerChunks:
    """Where a prefill is cut is not part of the choice."""

    id: ClassVar[str] = "chunks"
    promise: ClassVar[str] = "a row chooses the same keys in a chunk, over the keys that exist at its end"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def subjects(self, call: IndexerCall) -> Iterator[IndexerCall]:
        """The call itself."""
        yield call

    def applies(self, call: IndexerCall) -> str | None:
        """Needs two rows of one request."""
        return "no request of the call has two rows" if _longest(call) < 2 else None

    def variants(self, call: IndexerCall, seed: int) -> Iterator[IndexerVariant]:
        """Yield each request cut every 7, 16 and 64 rows, and in halves."""
        longest = _longest(call)
        sizes = {size: f"chunks of {size}" for size in SIZES if size < longest}
        sizes.setdefault((longest + 1) // 2, "halves")
        for size, name in sizes.items():
            yield IndexerVariant(name, cut(call, size))

    def broken(self) -> IndexerProvider:
        """Return an indexer whose later chunks choose among earlier keys only."""
        return FirstChunkOnly()


def _longest(call: IndexerCall) -> int:
    return int(np.bincount(call.rows.request).max())
