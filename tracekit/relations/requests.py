"""`requests`: a request's answer does not depend on where it stands among the requests of the batch."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from tracekit.controls.requests import TableByBatchIndex
from tracekit.model import AttentionCall
from tracekit.providers.base import Launch, Provider
from tracekit.relations.arrange import orders
from tracekit.relations.base import Expectation, Variant, rng


class Requests:
    """The batch index is not identity."""

    id: ClassVar[str] = "requests"
    promise: ClassVar[str] = "the requests of a batch give the same bits in any order"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def applies(self, call: AttentionCall) -> str | None:
        """Needs two requests."""
        return "the call has one request" if len(call.rows.requests) < 2 else None

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the requests reversed, rotated, and under random permutations.

        The rows of a request keep their order among themselves.
        """
        for name, order in orders(len(call.rows.requests), rng(seed, self.id)):
            rank = np.empty_like(order)
            rank[order] = np.arange(order.size)
            yield Variant(name, Launch((call.take(np.argsort(rank[call.rows.request], kind="stable")),)))

    def broken(self) -> Provider:
        """Return a kernel that finds KV by the batch index of its first launch."""
        return TableByBatchIndex()
