"""`vllm-mla-cpu`: vLLM's decode over latents for the CPU, from its wheel, without an engine.

The operator is `_C::mla_decode_kvcache`, which `CPU_MLA` calls. Each sequence has one query row and reads
every latent up to it, through pages of 16 rows; the first 512 elements of a latent are its value. The number
of threads decides bits, and nothing else of a launch was found to (docs/findings.md).
"""

import numpy as np
import torch

from tracekit.errors import Unsupported
from tracekit.model import Array, AttentionCall, Bits, DType, ExecutedIdentity, KVFamily
from tracekit.providers.base import Answer, Capabilities, Execution, Launch, Tensors, refusal
from tracekit.providers.placement import NULL_PAGE, Layout, Placement
from tracekit.providers.torch_tensors import from_torch, to_torch
from tracekit.providers.torch_threads import kernel_threads
from tracekit.providers.vllm_cpu_launch import MAX_THREADS, not_causal
from tracekit.providers.vllm_cpu_ops import executed_operator, operator
from tracekit.verdict import ClaimId

OPERATOR = "mla_decode_kvcache"
KERNEL = f"vllm.{OPERATOR}"
HEAD_DIM, VALUE_DIM, PAGE = 576, 512, 16
"""What the operator has compiled in."""


def executed() -> ExecutedIdentity:
    """Return what runs here."""
    return executed_operator(KERNEL, "vec")


class VllmMla:
    """vLLM's decode over latents for the CPU; one launch a call."""

    id = "vllm-mla-cpu"

    def __init__(self) -> None:
        operator(OPERATOR)

    def capabilities(self) -> Capabilities:
        """One row a request over one head of latents; no sink, no LSE."""
        return Capabilities(
            dtypes=frozenset({DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32}),
            families=frozenset({KVFamily.DENSE}),
            lse=False,
            max_head_dim=HEAD_DIM,
            probability_dtype={kind: kind for kind in (DType.BFLOAT16, DType.FLOAT16)},
            launch_plan=False,
            page_sizes=(PAGE,),
            layouts=(Layout.JOINED_NHD,),
        )

    def advertised(self) -> frozenset[ClaimId]:
        """What was found to hold; vLLM promises nothing in writing (docs/findings.md)."""
        return frozenset({"rerun", "recorded", "page-ids", "requests", "rows", "solo"})

    def identity(self) -> ExecutedIdentity:
        """What runs here."""
        return executed()

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why it cannot run a call."""
        if reason := refusal(self.capabilities(), call):
            return reason
        if call.num_kv_heads != 1 or (call.head_dim, call.value_dim) != (HEAD_DIM, VALUE_DIM):
            return f"its rows are one head of {HEAD_DIM} elements, of which {VALUE_DIM} are the value"
        if not_causal(call) or call.conventions.window is not None:
            return "it reads every key up to a row's own, and nothing else"
        if len(set(call.rows.request.tolist())) < call.num_rows:
            return "it takes one row of each request"
        for rows in (call.kv[key][KVFamily.DENSE] for key in call.rows.requests):
            if not np.array_equal(rows.value_bits.data, rows.keys.data[..., :VALUE_DIM]):
                return "its values are the first part of its keys, and these are not"
        return None

    def run(self, launch: Launch) -> Answer:
        """Run each call as one launch.

        Raises:
            Unsupported: `P-REFUSED`.
        """
        return Answer(tuple(self._run(call, launch.execution) for call in launch.calls), executed())

    def _run(self, call: AttentionCall, execution: Execution) -> Tensors:
        if reason := self.refuses(call):
            raise Unsupported(f"{self.id} cannot run this call: {reason}.", rule="P-REFUSED")
        cache, tables = _pages(call, execution.placement or Placement())
        # Copies in torch's memory: the operator loads whole cache lines and dies where one begins elsewhere.
        query, pages = to_torch(call.q).clone(), to_torch(cache).clone()
        out = torch.zeros(*query.shape[:2], VALUE_DIM, dtype=query.dtype)
        lengths = torch.from_numpy((call.rows.positions + 1).astype(np.int32))
        scale = float(call.conventions.scale)
        threads = execution.threads or call.provenance.threads
        with kernel_threads(min(threads, MAX_THREADS)):
            operator(OPERATOR)(out, query, pages, scale, torch.from_numpy(tables), lengths)
        return Tensors(Bits(from_torch(out, "out")[0], call.dtype), None)


def _pages(call: AttentionCall, placement: Placement) -> tuple[Bits, Array]:
    """The latents in pages `[pages, 16, 576]`, the null page first, and int32 `[T, nb]`, a table a row.

    What belongs to no row holds the latents of the first request, turned by one element: a read of it shows.
    """
    rows = [call.kv[call.rows.requests[index]][KVFamily.DENSE].keys for index in call.rows.request]
    counts = [-(-(int(position) + 1) // PAGE) for position in call.rows.positions]
    names, total = placement.pages(sum(counts))
    hot = np.roll(rows[0].data[:, 0], 1, axis=1)
    cache = hot[np.arange(total * PAGE) % len(hot)].reshape(total, PAGE, HEAD_DIM)
    tables = np.full((len(rows), max(counts)), NULL_PAGE, np.int32)
    at = 0
    for table, keys, count, position in zip(tables, rows, counts, call.rows.positions, strict=True):
        table[:count] = names[at : at + count]
        own = np.arange(int(position) + 1)
        cache[table[own // PAGE], own % PAGE] = keys.data[own, 0]
        at += count
    return Bits(cache, call.dtype), tables
