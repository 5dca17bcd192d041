"""`solo`: a row, and a request, gives the same bits alone as in its batch."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from tracekit.controls.solo import SmallBatchKernel
from tracekit.model import AttentionCall
from tracekit.providers.base import Launch, Provider
from tracekit.relations.base import Expectation, Variant


class Solo:
    """Company changes nothing."""

    id: ClassVar[str] = "solo"
    promise: ClassVar[str] = "a row gives the same bits alone as in its batch"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def applies(self, call: AttentionCall) -> str | None:
        """Needs two rows."""
        return "the call has one row" if call.num_rows < 2 else None

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield every row as a launch of its own, and every request; the KV stays as recorded."""
        rows = np.arange(call.num_rows)
        yield Variant("row alone", Launch(tuple(call.take(rows[t : t + 1]) for t in rows)))
        requests = [np.flatnonzero(call.rows.request == index) for index in range(len(call.rows.requests))]
        if 1 < len(requests) < call.num_rows:
            yield Variant("request alone", Launch(tuple(call.take(part) for part in requests)))

    def broken(self) -> Provider:
        """Return a kernel that is another one for one row."""
        return SmallBatchKernel()
