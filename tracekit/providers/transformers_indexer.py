"""`transformers-indexer`: the scoring of the recorded model's indexer and torch's top-k, run again."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tracekit.errors import Unsupported
from tracekit.model import Array, Bits, DType, ExecutedIdentity, IndexerCall, Lists
from tracekit.providers.indexers import Chosen, IndexerAnswer, IndexerLaunch
from tracekit.providers.torch_tensors import from_torch, to_torch
from tracekit.providers.torch_threads import kernel_threads
from tracekit.providers.transformers_identity import executed
from tracekit.verdict import ClaimId

Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Query `[1, S, H, D]`, keys `[1, T, D]`, weights `[1, S, H]` FP32, scale -> scores `[1, S, T]`."""


class TransformersIndexer:
    """The indexers of DeepSeek-V4 and V3.2; one launch of torch a request."""

    id = "transformers-indexer"

    def advertised(self) -> frozenset[ClaimId]:
        """Nothing: torch says of `topk` that ties may go either way, and of products no bits."""
        return frozenset()

    def identity(self) -> ExecutedIdentity:
        """torch and transformers as they are here."""
        return executed(self.id)

    def refuses(self, call: IndexerCall) -> str | None:
        """Return why it cannot run a call."""
        kernel = call.provenance.executed.kernel
        return None if kernel in _SCORES else f"it does not know the indexer {kernel}"

    def run(self, launch: IndexerLaunch) -> IndexerAnswer:
        """Run each call, request by request.

        Raises:
            Unsupported: `P-REFUSED`.
        """
        with kernel_threads(launch.execution.threads), torch.no_grad():
            chosen = tuple(self._run(call) for call in launch.calls)
        kernels = {call.provenance.executed.kernel for call in launch.calls}
        return IndexerAnswer(chosen, executed("+".join(sorted(kernels))))

    def _run(self, call: IndexerCall) -> Chosen:
        if reason := self.refuses(call):
            raise Unsupported(f"{self.id} cannot run this call: {reason}.", rule="P-REFUSED")
        score = _SCORES[call.provenance.executed.kernel]
        scale = float(np.array(call.scale_bits, np.uint32).view(np.float32))
        ids: list[Array] = [np.zeros(0, np.int64)] * call.num_rows
        values: list[Array] = [np.zeros(0, np.uint32)] * call.num_rows
        for index, key in enumerate(call.rows.requests):
            rows = np.flatnonzero(call.rows.request == index)
            query, weights = (to_torch(bits.take(rows))[None] for bits in (call.query, call.weights))
            keys = to_torch(call.keys[key])[None]
            visible = torch.from_numpy(call.visible[rows])
            scores = score(query, keys, weights, scale)
            future = torch.arange(keys.shape[1]) >= visible[:, None]
            scores = scores.masked_fill(future, float("-inf"))
            chosen = scores.topk(min(call.k, keys.shape[1]), dim=-1).indices
            data, _ = from_torch(scores.gather(-1, chosen), "scores")
            for place, t in enumerate(rows.tolist()):
                picked = chosen[0, place].numpy()
                valid = picked < call.visible[t]
                ids[t], values[t] = picked[valid], data[0, place][valid]
        flat = np.concatenate([np.zeros(0, np.uint32), *values])
        return Chosen(Lists.of(ids), Bits(flat, DType.FLOAT32))


def _score_v4(query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """The model's own scoring; its projection of the weights has already happened."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4IndexerScorer

    ready: Any = SimpleNamespace(softmax_scale=scale, weights_scaling=1.0, weights_proj=lambda given: given)
    scores: torch.Tensor = DeepseekV4IndexerScorer.forward(ready, query, keys, weights)
    return scores


def _score_v32(query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """The operations of V3.2, which has no function for them."""
    products = torch.matmul(query.float(), keys.transpose(-1, -2).float().unsqueeze(1)) * scale
    return torch.matmul(weights.unsqueeze(-2), torch.relu(products)).squeeze(-2)


_SCORES: dict[str, Score] = {
    "transformers.deepseek_v4.indexer": _score_v4,
    "transformers.deepseek_v32.indexer": _score_v32,
}
