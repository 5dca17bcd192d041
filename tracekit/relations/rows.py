"""`rows`: a row's answer does not depend on where it stands in the batch."""

from collections.abc import Iterator
from typing import ClassVar

from tracekit.controls.rows import StaleSlots
from tracekit.model import AttentionCall
from tracekit.providers.base import Launch, Provider
from tracekit.relations.arrange import orders
from tracekit.relations.base import Expectation, Variant, rng


class RowOrder:
    """The place in the batch is not identity."""

    id: ClassVar[str] = "rows"
    promise: ClassVar[str] = "the same row gives the same bits at any place in the batch"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def applies(self, call: AttentionCall) -> str | None:
        """Needs two rows."""
        return "the call has one row" if call.num_rows < 2 else None

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call reversed, rotated, and under random permutations.

        Permuting rows moves Q `[T, H, D]` and the selection together; KV is addressed by
        `(request, family, row)`, so it does not move.
        """
        for name, order in orders(call.num_rows, rng(seed, self.id)):
            yield Variant(name, Launch((call.take(order),)))

    def broken(self) -> Provider:
        """Return a kernel that writes rows to the slots of its first launch."""
        return StaleSlots()
