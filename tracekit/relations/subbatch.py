"""`subbatch`: companions taken away or added change nothing, across the sizes where kernels switch."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from tracekit.controls.subbatch import PlanOfFirstBatch
from tracekit.model import AttentionCall
from tracekit.providers.base import Launch, Provider
from tracekit.relations.arrange import foreign, groups, join
from tracekit.relations.base import Expectation, Variant
from tracekit.relations.company import in_company

SIZES = (2, 3, 4, 8, 16, 17, 32, 33, 64, 65, 128, 256)
"""Both sides of the tile sizes and batch thresholds that kernels are known to switch at."""

MOST_ADDED = 33


class Subbatch:
    """The number of companions chooses no arithmetic."""

    id: ClassVar[str] = "subbatch"
    promise: ClassVar[str] = "a row gives the same bits with fewer and with more companions"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def applies(self, call: AttentionCall) -> str | None:
        """Companions can be added to any call."""
        return None

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the rows in batches of each smaller size, the call with rows added, the call beside prefills.

        Added rows are copies under the names of other requests: they are run, and not compared. Copies of
        a decode are decodes; only the prefills bring a request with many rows over KV of another length.
        """
        for size in (size for size in SIZES if size < call.num_rows):
            parts = groups(call.num_rows, size)
            yield Variant(f"batches of {size}", Launch(tuple(call.take(part) for part in parts)))
        larger = [size for size in SIZES if call.num_rows < size <= MOST_ADDED]
        sizes = sorted({call.num_rows + 1, *larger})
        grown = _grown(call, sizes[-1])
        for size in sizes:
            name = f"{size - call.num_rows} row{'s' if size - call.num_rows > 1 else ''} added"
            yield Variant(name, Launch((grown.take(np.arange(size)),)))
        for name, company in in_company(call):
            yield Variant(name, Launch((company,)))

    def broken(self) -> Provider:
        """Return a kernel whose plan was made for the size of its first batch."""
        return PlanOfFirstBatch()


def _grown(call: AttentionCall, size: int) -> AttentionCall:
    """Return the call with copies of its rows behind it, under the names of other requests."""
    parts, missing = [call], size - call.num_rows
    while missing > 0:
        other = foreign(call, len(parts))
        parts.append(other if missing >= call.num_rows else other.take(np.arange(missing)))
        missing -= parts[-1].num_rows
    return join(parts)
