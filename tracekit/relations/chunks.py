"""`chunks`: a prefill cut into chunks gives the bits of the prefill in one piece."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from tracekit.controls.chunks import ChunkOnly
from tracekit.model import AttentionCall
from tracekit.providers.base import Launch, Provider
from tracekit.relations.arrange import by_request
from tracekit.relations.base import Expectation, Variant

SIZES = (7, 16, 64)


class Chunks:
    """Where a prefill is cut is not part of the answer."""

    id: ClassVar[str] = "chunks"
    promise: ClassVar[str] = (
        "a prefill gives the same bits in chunks, each over the KV that exists at its end"
    )
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a causal call with two rows of one request."""
        if not call.conventions.causal:
            return "the call is not causal: a chunk would miss rows that it reads"
        if max(rows.size for rows in by_request(call)) < 2:
            return "no request of the call has two rows"
        return None

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call cut every 7, 16 and 64 rows of a request, and in halves.

        Chunk i of all requests is one launch, over only the KV rows that exist at its end.
        """
        requests = by_request(call)
        longest = max(rows.size for rows in requests)
        sizes = {size: f"chunks of {size}" for size in SIZES if size < longest}
        sizes.setdefault((longest + 1) // 2, "halves")
        for size, name in sizes.items():
            chunks = [
                np.concatenate([rows[start : start + size] for rows in requests])
                for start in range(0, longest, size)
            ]
            yield Variant(name, Launch(tuple(call.take(chunk).visible_kv() for chunk in chunks)))

    def broken(self) -> Provider:
        """Return a kernel whose later chunks see only themselves."""
        return ChunkOnly()
