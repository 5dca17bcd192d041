"""What `RequestGate.run` costs beyond the kernel: a kernel that answers at once, called with and without it.

The peer is the budget of 20 µs a call that the request-mode gate is held to for decode of one request; the
other rows show how the cost grows with requests and with the size of O, which is looked at for NaNs.
"""

import statistics
import time
from dataclasses import dataclass

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
LAYERS, PROMPT = 4, 128


@dataclass(frozen=True)
class Shape:
    """Requests of a batch, query heads, width of a head, KV families."""

    requests: int
    heads: int
    dim: int
    families: tuple[KVFamily, ...] = (KVFamily.DENSE,)


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
    """Measure the five shapes; one request is the gated one."""
    two = (KVFamily.RECENT, KVFamily.C4)
    shapes = {
        "decode, 1 request 32x128": Shape(1, 32, 128),
        "decode, 1 request DSV4 64x512": Shape(1, 64, 512, two),
        "decode, 8 requests 32x128": Shape(8, 32, 128),
        "decode, 64 requests 32x128": Shape(64, 32, 128),
    }
    return [
        Row(name, cost(shape, rounds), BUDGET, "budget of one request", 1.0 if shape.requests == 1 else 0.0)
        for name, shape in shapes.items()
    ]


def cost(shape: Shape, rounds: int, steps: int = 40) -> float:
    """Return the median seconds of a gated call minus those of the kernel alone."""
    requests = [RequestKey.of_prompt([number]) for number in range(shape.requests)]
    prefill = [call(shape, requests, layer, 0, PROMPT) for layer in range(LAYERS)]
    decode = [
        [call(shape, requests, layer, PROMPT + step, PROMPT + step + 1) for layer in range(LAYERS)]
        for step in range(steps)
    ]
    first, kernel = Instant(PROMPT * shape.requests, shape), Instant(shape.requests, shape)
    gated, bare = [], []
    for _ in range(rounds):
        gate = RequestGate()
        for one in prefill:
            gate.run(one, first)  # type: ignore[arg-type]
        for layers in decode:
            for one in layers:
                start = time.perf_counter()
                gate.run(one, kernel)  # type: ignore[arg-type]
                between = time.perf_counter()
                kernel.run(Launch((one,)))
                gated.append(between - start)
                bare.append(time.perf_counter() - between)
    return statistics.median(gated) - statistics.median(bare)


def call(shape: Shape, requests: list[RequestKey], layer: int, first: int, end: int) -> AttentionCall:
    """Rows `first .. end - 1` of every request, over KV that is all zeros and shared."""
    count = end - first
    positions = np.tile(np.arange(first, end), len(requests))
    request = np.repeat(np.arange(len(requests), dtype=np.int32), count)
    key = (len(requests), first, end)
    if key not in _ROWS:
        _ROWS[key] = Rows(tuple(requests), request, positions, np.zeros_like(positions))
    kv = {family: zeros(family.visible(end - 1), 1, shape.dim) for family in shape.families}
    return AttentionCall(
        layer=layer,
        step=first,
        mode=Mode.DECODE if first else Mode.PREFILL,
        rows=_ROWS[key],
        q=Bits(np.zeros((positions.size, shape.heads, shape.dim), np.uint16), DType.BFLOAT16),
        kv={name: {family: KVRows(rows, None) for family, rows in kv.items()} for name in requests},
        sink=None,
        selection=Selection(
            {
                family: Ranges(np.zeros_like(positions), (positions + 1) // family.ratio)
                for family in shape.families
            }
        ),
        conventions=Conventions(scale_to_bits(shape.dim**-0.5)),
        provenance=Provenance("bench", "instant", ExecutedIdentity("instant")),
    )


_ROWS: dict[tuple[int, int, int], Rows] = {}


def zeros(*shape: int) -> Bits:
    return Bits(np.zeros(shape, np.uint16), DType.BFLOAT16)
