"""The sparse indexer of DeepSeek-V4 in vLLM on the CPU: what its operators were given, and what they chose.

Where a step holds no request of more than `index_topk` compressed rows, vLLM runs no indexer: every row reads
all of them. Else it launches one for the rows of prefills, then one for rows of decodes; each is a call.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tracekit.canonical.fp8_index_pages import read_keys
from tracekit.canonical.paged import page_slots
from tracekit.engines.torch_bits import borrow
from tracekit.engines.vllm_call import engine_name
from tracekit.engines.vllm_dsv4_call import NULL_PAGE
from tracekit.engines.vllm_points import layer_number
from tracekit.engines.vllm_step import Step
from tracekit.errors import Unsupported
from tracekit.model import Array, Bits, DType, KVFamily, Lists, Provenance, scale_to_bits
from tracekit.providers.vllm_dsv4_cache import FP8
from tracekit.providers.vllm_dsv4_indexer import SCORES, TOP_K, executed
from tracekit.recorder.observation import Borrowed, IndexerObservation, SeenKV

__all__ = ["SCORES", "TOP_K", "IndexerRun", "observe_indexers"]

FAMILY = KVFamily.C4


@dataclass(frozen=True, eq=False)
class IndexerRun:
    """The arguments of one `fp8_paged_mqa_logits_cpu`, in its order, and what came of it.

    Args:
        query: e4m3 codes `[N, H, D]`; their scales are in the weights.
        cache: uint8 `[pages, bytes]`.
        weights: FP32 `[N, H]`.
        lengths: `[N]`, the keys that each row chooses among.
        tables: `[N, nb]`, the block table of each row.
        page_size: rows of a page.
        width: columns of the scores.
        scores: FP32 `[N, width]`.
        chosen: `[N, k]`, -1 behind each choice; None where the second operator did not run for it.
    """

    query: torch.Tensor
    cache: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    page_size: int
    width: int
    scores: torch.Tensor
    chosen: torch.Tensor | None = None


def observe_indexers(
    name: str, layer: Any, runs: list[IndexerRun], step: Step
) -> Iterator[IndexerObservation]:
    """Yield the logical side of each launch of a layer's indexer in a step.

    Args:
        name: of the layer.
        layer: gives the most keys of a row.
        runs: its launches: prefills first, decodes behind them.
        step: the rows of the step.

    Raises:
        Unsupported: `V-INDEXER` when the launches are not those of the rows.
        InvalidCall: `C-...` a table or a key that cannot be read.
    """
    if layer.indexer is None:
        return
    total, most = step.positions.size, int(layer.indexer.topk_tokens)
    needed = (int(step.positions.max()) + 1) // FAMILY.ratio > most
    if not runs and not needed:
        return
    # The rows of decodes stand first in a batch, and are launched last.
    end = total
    for run in runs:
        rows = np.arange(end - run.query.shape[0], end)
        visible = (step.positions[rows] + 1) // FAMILY.ratio if rows.size and rows[0] >= 0 else rows
        if run.chosen is None or not np.array_equal(run.lengths.cpu().numpy(), visible):
            break
        yield _observe(name, run, run.chosen, rows, most, step)
        end = int(rows[0])
    if end:
        raise Unsupported(
            f"{end} of {total} rows have no launch of the indexer of layer {name} that is theirs; what it "
            "chose for them is not recorded.",
            rule="V-INDEXER",
            layer=name,
        )


def _observe(
    name: str, run: IndexerRun, chosen: torch.Tensor, rows: Array, most: int, step: Step
) -> IndexerObservation:
    present, request = np.unique(step.request[rows], return_inverse=True)
    positions = step.positions[rows]
    keys = {}
    for place in present:
        last = int(np.flatnonzero(step.request[rows] == place)[-1])
        handle = step.handles[place]
        table, count = run.tables[last].cpu().numpy(), int(run.lengths[last])
        keys[handle] = _keys(run, table, count, step.generations[handle])
    ids = chosen.cpu().numpy().astype(np.int64)
    held = ids >= 0
    scores = run.scores.detach().cpu().numpy()
    found = np.take_along_axis(scores, np.where(held, ids, 0), axis=1)[held]
    codes = run.query.view(torch.uint8).cpu().numpy()
    return IndexerObservation(
        layer=layer_number(name),
        requests=tuple(step.handles[place] for place in present),
        request=request.astype(np.int32),
        positions=positions,
        # Exact: a code of four significant bits is a BF16 number.
        query=Bits.from_float32(Bits(codes, FP8).to_float32(), DType.BFLOAT16),
        weights=Bits(borrow(run.weights, "index weights").data.copy(), DType.FLOAT32),
        keys=keys,
        top_k=Lists(ids[held], np.concatenate([[0], np.cumsum(held.sum(axis=1))]).astype(np.int64)),
        scores=Bits.from_float32(found, DType.FLOAT32),
        k=most,
        family=FAMILY,
        scale_bits=scale_to_bits(1.0),
        provenance=Provenance(
            engine_name(),
            "CPU_V4_INDEXER",
            executed(),
            torch.get_num_threads(),
            {"layer": name, "index_page": str(int(run.page_size))},
        ),
    )


def _keys(run: IndexerRun, table: Array, count: int, generation: int) -> SeenKV:
    """The index keys 0 .. count - 1 of a request, read back from their pages."""
    pages, page = int(run.cache.shape[0]), int(run.page_size)
    slots = page_slots(table, np.arange(count), page, pages=pages, null_page=NULL_PAGE)
    keys = read_keys(run.cache.numpy(), slots, page, int(run.query.shape[2]), FP8)
    return SeenKV(Borrowed(keys.data[None], keys.dtype), None, generation=generation)
