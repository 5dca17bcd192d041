"""`indexer-ref`: scores in binary64, and a choice with a rule for ties. The answer of a row is its own."""

import numpy as np
import numpy.typing as npt

from tracekit.model import Array, Bits, DType, ExecutedIdentity, IndexerCall, Lists
from tracekit.providers.indexers import Chosen, IndexerAnswer, IndexerLaunch
from tracekit.verdict import ClaimId


class IndexerRef:
    """The reference: highest score first, and among equal scores the lowest id first.

    A score is computed in binary64 and rounded once to binary32; scores are equal where these are, and -0
    equals +0.
    """

    id = "indexer-ref"

    def advertised(self) -> frozenset[ClaimId]:
        """Every claim about indexers: a row sees nothing but its own numbers."""
        return frozenset({"rows", "chunks", "ties"})

    def identity(self) -> ExecutedIdentity:
        """numpy, whose sums are part of the answer."""
        return ExecutedIdentity(self.id, {"numpy": np.__version__})

    def refuses(self, call: IndexerCall) -> str | None:
        """Takes every call."""
        return None

    def run(self, launch: IndexerLaunch) -> IndexerAnswer:
        """Run each call row by row."""
        return IndexerAnswer(tuple(self.choose(call) for call in launch.calls), self.identity())

    def choose(self, call: IndexerCall) -> Chosen:
        """Answer one call."""
        return chosen_of([self.row(call, t) for t in range(call.num_rows)])

    def row(self, call: IndexerCall, t: int) -> tuple[Array, npt.NDArray[np.float32]]:
        """Return the ids that row t chooses, best first, and the scores of all keys that it may choose."""
        scores = scores_of(call, t)
        return np.lexsort((np.arange(scores.size), -scores))[: call.k], scores


def scores_of(call: IndexerCall, t: int) -> npt.NDArray[np.float32]:
    """Return FP32 `[visible]`: the scores of the keys that row t chooses among.

    Each product is summed by itself, not by a matrix product, whose order of sums depends on its size.
    """
    key = call.rows.requests[int(call.rows.request[t])]
    keys = call.keys[key].part(slice(int(call.visible[t]))).to_float64()
    query, weights = call.query.part(t).to_float64(), call.weights.part(t).to_float64()
    scale = np.array(call.scale_bits, np.uint32).view(np.float32).astype(np.float64)
    heads = [np.maximum((keys * q).sum(axis=1) * scale, 0.0) * w for q, w in zip(query, weights, strict=True)]
    total: npt.NDArray[np.float64] = np.sum(heads, axis=0)
    return total.astype(np.float32)


def chosen_of(rows: list[tuple[Array, npt.NDArray[np.float32]]]) -> Chosen:
    """Put the choices of all rows together."""
    scores = [scores[ids] for ids, scores in rows]
    flat = np.concatenate([np.zeros(0, np.float32), *scores])
    return Chosen(Lists.of([ids.astype(np.int64) for ids, _ in rows]), Bits.from_float32(flat, DType.FLOAT32))
