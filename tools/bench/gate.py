"""What `RequestGate.run` costs beyond the kernel: a kernel that answers at once, called with and without it.

The peer is the budget of 20 µs a call that the request-mode gate is held to for decode of one request; the
other rows show how the cost grows with requests and with the size of O, which is looked at for NaNs.
"""

import statistics
import time
from dataclasses import dataclass
from functools import cache

import numpy as np

from tools.bench.timing import Row
from tracekit.gate import RequestGate
from tracekit.model import (
    AttentionCall,
    Bits,
    Conventions,
    DType,
    ExecutedIdentity,
    KVFamily,
    KVRows,
    Mode,
    Provenance,
    Ranges,
    RequestKey,
    Rows,
    Selection,
    scale_to_bits,
)
from tracekit.providers.base import Answer, Launch, Tensors

BUDGET = 20e-6
PROMPT = 128
DENSE = ((KVFamily.DENSE,),)
DSV4 = ((KVFamily.RECENT,), (KVFamily.RECENT, KVFamily.C4), (KVFamily.RECENT, KVFamily.C128))


@dataclass(frozen=True)
class Shape:
    """Requests of a batch, query heads, width of a head, layers, KV families of layer 0, 1, ... in turn."""

    requests: int
    heads: int
    dim: int
    layers: int = 32
    families: tuple[tuple[KVFamily, ...], ...] = DENSE
    window: int | None = None


class Instant:
    """A kernel that gives the same answer to calls of the same number of rows."""

    id = "instant"

    def __init__(self, rows: int, shape: Shape) -> None:
        out = np.full((rows, shape.heads, shape.dim), 0x3F80, np.uint16)
        lse = np.full((rows, shape.heads), 0x3F800000, np.uint32)
        self._answer = Answer(
            (Tensors(Bits(out, DType.BFLOAT16), Bits(lse, DType.FLOAT32)),), ExecutedIdentity("instant")
        )

    def run(self, launch: Launch) -> Answer:
        return self._answer


def rows(rounds: int) -> list[Row]:
    """Measure four shapes; those of one request are held to the budget."""
    shapes = {
        "decode, 1 request 32x128": Shape(1, 32, 128),
        "decode, 1 request DSV4 64x512": Shape(1, 64, 512, 61, DSV4, 128),
        "decode, 8 requests 32x128": Shape(8, 32, 128),
        "decode, 64 requests 32x128": Shape(64, 32, 128),
    }
    return [
        Row(name, cost(shape, rounds), BUDGET, "budget of one request", 1.0 if shape.requests == 1 else 0.0)
        for name, shape in shapes.items()
    ]


def cost(shape: Shape, rounds: int, steps: int = 20) -> float:
    """Return the median seconds of a gated call minus those of the kernel alone."""
    requests = [RequestKey.of_prompt([number]) for number in range(shape.requests)]
    prefill = [call(shape, requests, layer, 0, PROMPT) for layer in range(shape.layers)]
    first, kernel = Instant(PROMPT * shape.requests, shape), Instant(shape.requests, shape)
    gated, bare = [], []
    for _ in range(rounds):
        gate = RequestGate()
        for one in prefill:
            gate.run(one, first)  # type: ignore[arg-type]
        for step in range(steps):
            row = PROMPT + step
            for one in [call(shape, requests, layer, row, row + 1) for layer in range(shape.layers)]:
                start = time.perf_counter()
                gate.run(one, kernel)  # type: ignore[arg-type]
                between = time.perf_counter()
                kernel.run(Launch((one,)))
                gated.append(between - start)
                bare.append(time.perf_counter() - between)
    return statistics.median(gated) - statistics.median(bare)


def call(shape: Shape, requests: list[RequestKey], layer: int, first: int, end: int) -> AttentionCall:
    """Rows `first .. end - 1` of every request, over KV that is all zeros and shared."""
    rows = rows_of(tuple(requests), first, end)
    families = shape.families[layer % len(shape.families)]
    kv, selection = {}, {}
    for family in families:
        window = shape.window if family is KVFamily.RECENT else None
        oldest = 0 if window is None else max(0, first - window + 1)
        kv[family] = KVRows(zeros(family.visible(end - 1) - oldest, 1, shape.dim), None, oldest)
        hi = (rows.positions + 1) // family.ratio
        lo = np.zeros_like(hi) if window is None else np.maximum(hi - window, 0)
        selection[family] = Ranges(lo, hi)
    return AttentionCall(
        layer=layer,
        step=first,
        mode=Mode.DECODE if first else Mode.PREFILL,
        rows=rows,
        q=zeros(rows.count, shape.heads, shape.dim),
        kv=dict.fromkeys(requests, kv),
        sink=None,
        selection=Selection(selection),
        conventions=Conventions(scale_to_bits(shape.dim**-0.5), window=shape.window),
        provenance=Provenance("bench", "instant", ExecutedIdentity("instant")),
    )


@cache
def rows_of(requests: tuple[RequestKey, ...], first: int, end: int) -> Rows:
    """The rows of a step, which its layers share."""
    positions = np.tile(np.arange(first, end), len(requests))
    request = np.repeat(np.arange(len(requests), dtype=np.int32), end - first)
    return Rows(requests, request, positions, np.zeros_like(positions))


@cache
def zeros(*shape: int) -> Bits:
    return Bits(np.zeros(shape, np.uint16), DType.BFLOAT16)
