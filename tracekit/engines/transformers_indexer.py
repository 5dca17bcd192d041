"""The sparse indexers of DeepSeek-V3.2 and V4 in transformers: what they multiplied and what they chose.

Their forward makes query, scores and choice inside itself and gives back indices alone. While it runs, a
torch function mode looks at the three operations that matter; each runs as it would without.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tracekit.canonical.padded import PaddedBatch
from tracekit.engines.torch_bits import borrow, take_rows
from tracekit.engines.transformers_families import ratio_family, refuse_padding
from tracekit.engines.transformers_step import Forward
from tracekit.errors import Unsupported
from tracekit.model import Array, Bits, DType, KVFamily, Lists, Provenance, scale_to_bits
from tracekit.providers.transformers_identity import engine_name, executed
from tracekit.recorder.observation import Borrowed, IndexerObservation, SeenKV


@dataclass(frozen=True, eq=False)
class Indexer:
    """What is fixed about an indexer.

    Args:
        kernel: its name in a trace.
        weight: the parameter of the projection that gives the weights of the heads.
        weight_factor: the constant factor on these weights.
        scale: the factor on q.k.
        k: the most keys of a row.
        family: whose rows it chooses.
    """

    kernel: str
    weight: torch.Tensor
    weight_factor: float
    scale: float
    k: int
    family: KVFamily


def indexer_of(attention: Any) -> Any:
    """Return the indexer module of an attention module, or None."""
    return getattr(attention, "indexer", None) or getattr(
        getattr(attention, "compressor", None), "indexer", None
    )


def describe(module: Any) -> Indexer:
    """Return what is fixed about an indexer module."""
    if hasattr(module, "scorer"):
        scorer = module.scorer
        return Indexer(
            "transformers.deepseek_v4.indexer",
            scorer.weights_proj.weight,
            scorer.weights_scaling,
            scorer.softmax_scale,
            int(module.index_topk),
            ratio_family(int(module.compress_rate)),
        )
    return Indexer(
        "transformers.deepseek_v32.indexer",
        module.weights_proj.weight,
        module.n_heads**-0.5,
        module.softmax_scale,
        int(module.index_topk),
        KVFamily.DENSE,
    )


class Watch(TorchFunctionMode):
    """Looks on while one indexer runs.

    After the run: `query` `[B, S, H, D]` and `keys` `[B, T, D]` in FP32 as they were multiplied, `weights`
    `[B, S, H]` as projected, `scores` `[B, S, T]` and `chosen` `[B, S, k]`; None where not seen.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = weight
        self.query: torch.Tensor | None = None
        self.keys: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None
        self.scores: torch.Tensor | None = None
        self.chosen: torch.Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and keep what it is about."""
        result = func(*args, **(kwargs or {}))
        if func is torch.matmul and self.query is None:
            self.query, self.keys = args[0], args[1].squeeze(1).transpose(-1, -2)
        elif func is torch.nn.functional.linear and args[1] is self._weight:
            self.weights = result
        elif func in (torch.topk, torch.Tensor.topk):
            self.scores, self.chosen = args[0], result.indices
        return result


def observe_indexer(module: Any, layer: int, watch: Watch, forward: Forward) -> IndexerObservation:
    """Return the logical side of one run of an indexer.

    Raises:
        Unsupported: `T-PADDED`; `T-INDEXER` when the run was not what is known of such indexers.
    """
    known = describe(module)
    seen = (watch.query, watch.keys, watch.weights, watch.scores, watch.chosen)
    query, keys, weights, scores, chosen = (None if x is None else x.detach() for x in seen)
    if query is None or keys is None or weights is None or scores is None or chosen is None:
        raise Unsupported(
            f"{type(module).__name__} did not multiply and choose as tracekit knows it; record with the "
            "version of transformers in docs/engines.md.",
            rule="T-INDEXER",
        )
    dense = known.family is KVFamily.DENSE
    if not dense:
        refuse_padding(forward)
    batch = forward.batch(keys.shape[1] if dense else forward.queries)
    rows, sequence = batch.row_slots, batch.sequence
    present, request = np.unique(sequence, return_inverse=True)
    top_k, values = _choice(scores, chosen, batch, known)
    kind = module_dtype(module)
    stored = _narrow(keys, kind)
    held = borrow(stored.unsqueeze(1), "index keys")
    places = {int(b): batch.key_slots(int(b)) if dense else slice(None) for b in present}
    return IndexerObservation(
        layer=layer,
        requests=tuple(forward.handles[b] for b in present),
        request=request.astype(np.int32),
        positions=batch.positions,
        query=take_rows(_narrow(query, kind), rows, "index query"),
        weights=take_rows(weights.float() * known.weight_factor, rows, "index weights"),
        keys={
            forward.handles[b]: SeenKV(Borrowed(held.data[b][:, place], held.dtype), None)
            for b, place in places.items()
        },
        top_k=top_k,
        scores=values,
        k=known.k,
        family=known.family,
        scale_bits=scale_to_bits(known.scale),
        provenance=Provenance(
            engine_name(),
            known.kernel,
            executed(known.kernel, query.device.type),
            torch.get_num_threads(),
            {"module": f"{type(module).__module__}.{type(module).__qualname__}"},
        ),
    )


def module_dtype(module: Any) -> torch.dtype:
    """Return the dtype of the query projection, which query and keys have before they are widened."""
    kind: torch.dtype = (module.q_b_proj if hasattr(module, "q_b_proj") else module.wq_b).weight.dtype
    return kind


def _narrow(tensor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Undo a widening to FP32; a tensor that never was narrower stays as it is."""
    narrow = tensor.to(kind)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def _choice(
    scores: torch.Tensor, chosen: torch.Tensor, batch: PaddedBatch, known: Indexer
) -> tuple[Lists, Bits]:
    """The logical rows that each row chose, in executed order, and their scores.

    Where fewer keys are visible than k, the rest of the choice are keys of the future or padding with the
    lowest score: no choice at all, and left out.
    """
    slots = chosen.flatten(0, 1).cpu().numpy()[batch.row_slots]
    values = scores.gather(-1, chosen).to(torch.float32)
    data = take_rows(values, batch.row_slots, "index scores").data
    sequence = batch.sequence
    if known.family is KVFamily.DENSE:
        ids: Array = batch.key_rows[sequence[:, None], slots]
        real = batch.real_keys[sequence[:, None], slots]
    else:
        ids, real = slots.astype(np.int64), np.ones(slots.shape, np.bool_)
    visible = (batch.positions + 1) // known.family.ratio
    taken = real & (ids < visible[:, None])
    offsets = np.concatenate([[0], np.cumsum(taken.sum(1))]).astype(np.int64)
    return Lists(ids[taken], offsets), Bits(data[taken], DType.FLOAT32)
