"""Small calls and traces in memory, the same from the same seed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracekit.model import (
    AttentionCall,
    Bits,
    Conventions,
    DType,
    ExecutedIdentity,
    Gradients,
    KVFamily,
    KVRows,
    Lists,
    Mode,
    Origin,
    Output,
    Provenance,
    Ranges,
    Recording,
    RequestKey,
    Rows,
    Selection,
    StepRecord,
    scale_to_bits,
)
from tracekit.providers.base import Launch, Provider


def dense_call(
    *,
    lengths: Sequence[int] = (5,),
    new: Sequence[int] | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: DType = DType.BFLOAT16,
    sink: bool = False,
    window: int | None = None,
    layer: int = 0,
    step: int = 0,
    seed: int = 0,
) -> AttentionCall:
    """Return a causal call over dense KV.

    Args:
        lengths: tokens of each request.
        new: query rows of each request, its last ones; all of them where absent (a prefill).
        heads: H.
        kv_heads: Hkv.
        head_dim: D and Dv.
        dtype: of Q, K and V.
        sink: whether there is one.
        window: sliding window in tokens.
        layer: the layer.
        step: the step.
        seed: of the numbers.
    """
    random = np.random.default_rng(seed)
    rows, positions = _rows(lengths, lengths if new is None else new, random)

    def numbers(*shape: int) -> Bits:
        return Bits.from_float32(random.standard_normal(shape, np.float32), dtype)

    kv = {
        key: {KVFamily.DENSE: KVRows(numbers(n, kv_heads, head_dim), numbers(n, kv_heads, head_dim))}
        for key, n in zip(rows.requests, lengths, strict=True)
    }
    lo = np.zeros_like(positions) if window is None else np.maximum(0, positions + 1 - window)
    return AttentionCall(
        layer=layer,
        step=step,
        mode=Mode.PREFILL if new is None else Mode.DECODE,
        rows=rows,
        q=numbers(rows.count, heads, head_dim),
        kv=kv,
        sink=_sink(heads, random) if sink else None,
        selection=Selection({KVFamily.DENSE: Ranges(lo, positions + 1)}),
        conventions=Conventions(scale_to_bits(head_dim**-0.5), window=window),
        provenance=Provenance("in memory", "none", ExecutedIdentity("none")),
    )


def sparse_call(
    *,
    lengths: Sequence[int] = (40,),
    new: Sequence[int] | None = None,
    heads: int = 4,
    head_dim: int = 32,
    top: int = 6,
    window: int = 8,
    sink: bool = True,
    layer: int = 0,
    step: int = 0,
    seed: int = 0,
) -> AttentionCall:
    """Return a call over compressed rows (a list, in random order) and recent rows, K and V one tensor.

    Args:
        lengths: tokens of each request.
        new: query rows of each request; all where absent.
        heads: H; there is one KV head.
        head_dim: D and Dv.
        top: most compressed rows that a query row reads.
        window: recent rows that it reads.
        sink: whether there is one.
        layer: the layer.
        step: the step.
        seed: of the numbers.
    """
    random = np.random.default_rng(seed)
    rows, positions = _rows(lengths, lengths if new is None else new, random)

    def numbers(*shape: int) -> Bits:
        return Bits.from_float32(random.standard_normal(shape, np.float32), DType.BFLOAT16)

    kv = {
        key: {
            KVFamily.C4: KVRows(numbers(n // 4, 1, head_dim), None),
            KVFamily.RECENT: KVRows(numbers(n, 1, head_dim), None),
        }
        for key, n in zip(rows.requests, lengths, strict=True)
    }
    lists = [random.permutation((int(p) + 1) // 4)[:top] for p in positions]
    recent = Ranges(np.maximum(0, positions + 1 - window), positions + 1)
    return AttentionCall(
        layer=layer,
        step=step,
        mode=Mode.PREFILL if new is None else Mode.DECODE,
        rows=rows,
        q=numbers(rows.count, heads, head_dim),
        kv=kv,
        sink=_sink(heads, random) if sink else None,
        selection=Selection({KVFamily.C4: Lists.of(lists), KVFamily.RECENT: recent}),
        conventions=Conventions(scale_to_bits(head_dim**-0.5), window=window),
        provenance=Provenance("in memory", "none", ExecutedIdentity("none")),
    )


def with_d_out(call: AttentionCall, seed: int = 0) -> AttentionCall:
    """Return the call with a gradient of O, in the dtype of the call."""
    random = np.random.default_rng([seed, 1])
    shape = (call.num_rows, call.num_heads, call.value_dim)
    d_out = Bits.from_float32(random.standard_normal(shape, np.float32), call.dtype)
    return replace(call, grads=Gradients(d_out))


def record(call: AttentionCall, provider: Provider, engine: str = "in memory") -> AttentionCall:
    """Return the call with the answer of a provider as its executed output, asked for by an engine."""
    answer = provider.run(Launch((call,)))
    (tensors,) = answer.tensors
    return replace(
        call,
        out=Output(tensors.out, Origin.EXECUTED),
        lse=None if tensors.lse is None else Output(tensors.lse, Origin.EXECUTED),
        provenance=Provenance(engine, provider.id, answer.executed),
    )


@dataclass(frozen=True)
class MemoryHead:
    """What is known of a call before it is read."""

    index: int
    layer: int
    step: int
    requests: tuple[RequestKey, ...]
    num_rows: int
    kernel: str


def complete(calls: Sequence[AttentionCall]) -> tuple[StepRecord, ...]:
    """Return the ledger of a capture that lost nothing: one line a step."""
    counts = Counter(call.step for call in calls)
    return tuple(StepRecord(step, count, count, count, 0) for step, count in sorted(counts.items()))


_COMPLETE = Recording()


@dataclass(frozen=True, eq=False)
class MemoryTrace:
    """A trace without a file.

    Args:
        calls: its calls.
        recording: requests and ledger; absent it is a complete capture of these calls.
        name: how reports call it.
    """

    calls: tuple[AttentionCall, ...]
    recording: Recording = _COMPLETE
    name: str = "memory"

    def __post_init__(self) -> None:
        if self.recording is _COMPLETE:
            object.__setattr__(self, "recording", Recording(ledger=complete(self.calls)))

    @property
    def heads(self) -> tuple[MemoryHead, ...]:
        """One head a call."""
        return tuple(map(_head, range(len(self.calls)), self.calls))

    def call(self, index: int) -> AttentionCall:
        """Return one call."""
        return self.calls[index]


def _head(index: int, call: AttentionCall) -> MemoryHead:
    kernel = call.provenance.executed.kernel
    return MemoryHead(index, call.layer, call.step, call.rows.requests, call.num_rows, kernel)


def _rows(
    lengths: Sequence[int], new: Sequence[int], random: np.random.Generator
) -> tuple[Rows, "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"]:
    tokens = [random.integers(0, 1000, n) for n in lengths]
    positions = [np.arange(n - count, n) for n, count in zip(lengths, new, strict=True)]
    rows = Rows(
        tuple(RequestKey.of_prompt([number, *tokens[number]]) for number in range(len(lengths))),
        np.repeat(np.arange(len(lengths)), new).astype(np.int32),
        np.concatenate(positions),
        np.concatenate([ids[at] for ids, at in zip(tokens, positions, strict=True)]),
    )
    return rows, rows.positions


def _sink(heads: int, random: np.random.Generator) -> Bits:
    return Bits.from_float32(random.standard_normal(heads, np.float32), DType.FLOAT32)
