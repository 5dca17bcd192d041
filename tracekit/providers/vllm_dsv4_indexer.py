"""`vllm-dsv4-indexer`: the operators of vLLM's DeepSeek-V4 indexer for the CPU, run again.

`_C::fp8_paged_mqa_logits_cpu` gives each row the scores of its keys, `_C::topk_transform_512_cpu` chooses 512
of them. Both treat a row by itself. The FP8 bytes are made from the values that the call holds: a query is
its codes, a key has the smallest scale that fits it.
"""

import numpy as np
import torch

from tracekit.canonical import fp8
from tracekit.canonical.fp8_index_pages import page_bytes, write_keys
from tracekit.errors import InvalidCall, Unsupported
from tracekit.model import Array, Bits, DType, ExecutedIdentity, IndexerCall, Lists
from tracekit.providers.indexers import Chosen, IndexerAnswer, IndexerLaunch
from tracekit.providers.torch_tensors import to_torch
from tracekit.providers.torch_threads import kernel_threads
from tracekit.providers.vllm_cpu_ops import executed_operator, operator
from tracekit.providers.vllm_dsv4_cache import FP8, smallest_scales
from tracekit.verdict import ClaimId

KERNEL = "vllm.dsv4_indexer_cpu"
SCORES = "fp8_paged_mqa_logits_cpu"
TOP_K = "topk_transform_512_cpu"
K, DIM, PAGE = 512, 128, 64
"""What the operators have compiled in, and the rows of a page of vLLM's 256 tokens."""


def executed() -> ExecutedIdentity:
    """Return what runs here."""
    return executed_operator(KERNEL, "avx512_bf16")


class VllmDsv4Indexer:
    """vLLM's indexer of DeepSeek-V4 for the CPU; one launch a call."""

    id = "vllm-dsv4-indexer"

    def __init__(self) -> None:
        for name in (SCORES, TOP_K):
            operator(name)

    def advertised(self) -> frozenset[ClaimId]:
        """What was found to hold on recorded numbers (docs/findings.md)."""
        return frozenset({"rows", "chunks"})

    def identity(self) -> ExecutedIdentity:
        """What runs here."""
        return executed()

    def refuses(self, call: IndexerCall) -> str | None:
        """Return why it cannot run a call."""
        if call.k != K or call.query.shape[2] != DIM:
            return f"it chooses {K} keys of {DIM} elements, not {call.k} of {call.query.shape[2]}"
        if call.query.dtype is not DType.BFLOAT16 or call.weights.dtype is not DType.FLOAT32:
            return "its query is of e4m3 values held in bfloat16, and its weights float32"
        try:
            _codes(call.query)
            _cache(call)
        except InvalidCall as error:
            return str(error).rstrip(".")
        return None

    def run(self, launch: IndexerLaunch) -> IndexerAnswer:
        """Run each call as one launch.

        Raises:
            Unsupported: `P-REFUSED`.
        """
        with kernel_threads(launch.execution.threads):
            return IndexerAnswer(tuple(self._run(call) for call in launch.calls), executed())

    def _run(self, call: IndexerCall) -> Chosen:
        if reason := self.refuses(call):
            raise Unsupported(f"{self.id} cannot run this call: {reason}.", rule="P-REFUSED")
        cache, tables = _cache(call)
        lengths = torch.from_numpy(call.visible.astype(np.int32))
        pages = torch.from_numpy(tables[call.rows.request])
        query = torch.from_numpy(_codes(call.query).copy()).view(torch.float8_e4m3fn)
        width = max(1, int(call.visible.max()))
        scale = np.array(call.scale_bits, np.uint32).view(np.float32)
        weights = to_torch(call.weights) * float(scale)
        scores = operator(SCORES)(query, torch.from_numpy(cache), weights, lengths, pages, PAGE, width)
        chosen = torch.full((call.num_rows, K), -1, dtype=torch.int32)
        operator(TOP_K)(scores, lengths, pages, torch.empty_like(chosen), PAGE, chosen)
        ids = chosen.numpy().astype(np.int64)
        held = ids >= 0
        found = np.take_along_axis(scores.numpy(), np.where(held, ids, 0), axis=1)[held]
        lists = Lists(ids[held], np.concatenate([[0], np.cumsum(held.sum(axis=1))]).astype(np.int64))
        return Chosen(lists, Bits.from_float32(found, DType.FLOAT32))


def _codes(query: Bits) -> Array:
    """The e4m3 codes of a query, uint8 `[T, H, D]`; InvalidCall where a value has none."""
    scales = np.full((*query.shape[:2], 1), 127, np.uint8)
    return fp8.encode(query, scales, FP8).codes.data


def _cache(call: IndexerCall) -> tuple[Array, Array]:
    """The pages of the keys of all requests, and a table of pages a request, int32 `[R, nb]`."""
    counts = [call.keys[key].shape[0] for key in call.rows.requests]
    pages = [-(-count // PAGE) for count in counts]
    cache = np.zeros((max(1, sum(pages)), page_bytes(PAGE, DIM)), np.uint8)
    tables, first = np.zeros((len(counts), max(1, *pages)), np.int32), 0
    for row, key, count, held in zip(tables, call.rows.requests, counts, pages, strict=True):
        row[:held] = first + np.arange(held)
        keys = call.keys[key]
        scales = smallest_scales(keys.to_float64(), DIM)[:, 0]
        write_keys(cache, first * PAGE + np.arange(count), PAGE, keys, scales, FP8)
        first += held
    return cache, tables
