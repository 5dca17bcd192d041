"""`rows`, of an indexer: what a row chooses does not depend on where it stands in the batch."""

from collections.abc import Iterator
from typing import ClassVar

from tracekit.controls.indexers import IndexerSlots
from tracekit.model import IndexerCall
from tracekit.providers.indexers import IndexerLaunch, IndexerProvider
from tracekit.relations.arrange import orders
from tracekit.relations.base import Expectation, rng
from tracekit.relations.indexers import IndexerVariant


class IndexerRows:
    """The place in the batch is not identity."""

    id: ClassVar[str] = "rows"
    promise: ClassVar[str] = "the same row chooses the same keys at any place in the batch"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def subjects(self, call: IndexerCall) -> Iterator[IndexerCall]:
        """The call itself."""
        yield call

    def applies(self, call: IndexerCall) -> str | None:
        """Needs two rows."""
        return "the call has one row" if call.num_rows < 2 else None

    def variants(self, call: IndexerCall, seed: int) -> Iterator[IndexerVariant]:
        """Yield the call reversed, rotated, and under random permutations."""
        for name, order in orders(call.num_rows, rng(seed, self.id)):
            yield IndexerVariant(name, IndexerLaunch((call.take(order),)))

    def broken(self) -> IndexerProvider:
        """Return an indexer that writes choices to the slots of its first launch."""
        return IndexerSlots()
