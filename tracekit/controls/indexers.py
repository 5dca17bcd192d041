"""The broken twins of the claims about indexers, each right in its first launch."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tracekit.model import Array, IndexerCall, RequestKey, RowId
from tracekit.providers.indexer_ref import IndexerRef, chosen_of
from tracekit.providers.indexers import Chosen
from tracekit.verdict import ClaimId


class IndexerTwin(IndexerRef):
    """The reference with one fault."""

    def advertised(self) -> frozenset[ClaimId]:
        """No promise."""
        return frozenset()


class UnstableTies(IndexerTwin):
    """Fault: after the first launch, equal scores go to the highest id.

    After SGLang #31115, FlashInfer #2584 and vLLM #56749: which of equal scores wins depends on how the
    rows were laid out.
    """

    id = "twin-ties"

    def __init__(self) -> None:
        self.launches = 0

    def choose(self, call: IndexerCall) -> Chosen:
        """Answer one call."""
        self.launches += 1
        return super().choose(call)

    def row(self, call: IndexerCall, t: int) -> tuple[Array, npt.NDArray[np.float32]]:
        """Choose with the other rule for ties after the first launch."""
        ids, scores = super().row(call, t)
        if self.launches > 1:
            ids = np.lexsort((-np.arange(scores.size), -scores))[: call.k]
        return ids, scores


class FirstChunkOnly(IndexerTwin):
    """Fault: rows that start later than the first launch choose among keys from before their chunk.

    After hw-native-sys/pypto-lib #592.
    """

    id = "twin-indexer-chunks"

    def __init__(self) -> None:
        self.starts: dict[RequestKey, int] = {}

    def row(self, call: IndexerCall, t: int) -> tuple[Array, npt.NDArray[np.float32]]:
        """Choose among the keys that existed when the chunk began."""
        ids, scores = super().row(call, t)
        request = int(call.rows.request[t])
        start = int(call.rows.positions[call.rows.request == request].min())
        first = self.starts.setdefault(call.rows.requests[request], start)
        return (ids if start <= first else ids[ids < start // call.family.ratio]), scores


class IndexerSlots(IndexerTwin):
    """Fault: choices are written to the slots of the first launch."""

    id = "twin-indexer-rows"

    def __init__(self) -> None:
        self.slots: Sequence[RowId] = ()

    def choose(self, call: IndexerCall) -> Chosen:
        """Answer one call; rows of the first launch go to their old slots."""
        self.slots = self.slots or call.rows.ids
        if set(self.slots) != set(call.rows.ids):
            return super().choose(call)
        return chosen_of([self.row(call, call.rows.ids.index(row)) for row in self.slots])
