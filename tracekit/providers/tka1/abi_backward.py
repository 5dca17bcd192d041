"""The arguments of a backward as kernels/tk_grad.h and tk_grad_block.h lay them out, host and device."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.providers.tka1.abi import THREADS, Args, Place, arguments
from tracekit.providers.tka1.gradients import Backward, Gradients
from tracekit.providers.tka1.inputs import DTYPES, LEAF, Partials


class _GradRows(ctypes.Structure):
    """`tk_grad_rows` of kernels/tk_grad.h."""

    _fields_ = (("k", ctypes.c_void_p), ("v", ctypes.c_void_p), ("count", ctypes.c_int64))


class GradArgs(ctypes.Structure):
    """`tk_grad_args` of kernels/tk_grad.h."""

    _fields_ = (
        ("a", Args),
        *((n, ctypes.c_void_p) for n in ("d_out", "positions", "d_q", "d_sink")),
        ("rows", ctypes.c_void_p * 2),
        *((n, ctypes.c_int32) for n in ("requests", "d_type")),
        ("last", ctypes.c_float),
    )


def grad_arguments(backward: Backward, rows: Partials, results: Gradients, place: Place) -> GradArgs:
    """Return the arguments of a backward; `rows` are those before S10 and `results` its outputs."""
    inputs = backward.inputs
    before = {"acc": rows.acc, "l": rows.l, "m": rows.m}
    tables = [
        place(
            np.array(
                [
                    (place(k), 0 if v is k else place(v), len(k))
                    for k, v in zip(family.keys, family.values, strict=True)
                ],
                np.int64,
            )
        )
        for family in results.families
    ]
    return GradArgs(
        a=arguments(inputs, place, before),
        d_out=place(backward.d_out),
        positions=place(backward.positions),
        d_q=place(results.d_q),
        d_sink=None if results.d_sink is None else place(results.d_sink),
        rows=(ctypes.c_void_p * 2)(*tables),
        requests=len(inputs.families[0].keys),
        d_type=DTYPES.index(backward.dtype),
        last=-0.0 if backward.unfinished else 0.0,
    )


# ---- on a device


GRAD_KEYS = 8
"""TK_GRAD_KEYS: rows of KV of a block of the backward."""

_END_BYTES = 28
"""Size of a `tk_end` of kernels/tk_row.h."""


class GpuGradArgs(ctypes.Structure):
    """`tk_gpu_grad_args` of kernels/tk_grad_block.h."""

    _fields_ = (
        ("g", GradArgs),
        *((n, ctypes.c_void_p) for n in ("end", "delta", "lines", "first", "items", "nodes")),
        *((n, ctypes.c_int32) for n in ("depth", "width", "stride", "group")),
    )


@dataclass(frozen=True, eq=False)
class GradBlocks:
    """How a backward is cut into blocks.

    Args:
        lines: int32 [T * group, 2], (query row, head in its group) of each request, by position.
        first: int32 [requests + 1], where a request begins in them.
        items: int64 [n, 2], (family and request as two int32, first key) of each block of keys.
        stride: D + Dv, to a multiple of the threads of a block.
        depth: unfinished nodes of a sum, at most.
        grids: the kernels in order, with their grids.
    """

    lines: npt.NDArray[np.int32]
    first: npt.NDArray[np.int32]
    items: npt.NDArray[np.int64]
    stride: int
    depth: int
    grids: tuple[tuple[str, tuple[int, int, int]], ...]


def grad_blocks(backward: Backward) -> GradBlocks:
    """Cut a backward."""
    inputs = backward.inputs
    rows, heads, dim = inputs.q.shape
    group, requests = heads // inputs.kv_heads, len(inputs.families[0].keys)
    order = np.lexsort((backward.positions, inputs.request))
    lines = np.stack([np.repeat(order, group), np.tile(np.arange(group), rows)], 1).astype(np.int32)
    counts = np.bincount(inputs.request, minlength=requests) * group
    items = [
        ((np.int64(r) << 32) | number, key)
        for number, family in enumerate(inputs.families)
        for r, keys in enumerate(family.keys)
        for key in range(0, len(keys), GRAD_KEYS)
    ]
    leaves = [int(backward.positions.max(initial=0)) // LEAF]
    leaves += [
        (first + len(k)) // LEAF for f in inputs.families for k, first in zip(f.keys, f.first, strict=True)
    ]
    sinks = () if inputs.sink is None else (("tk_grad_sinks", (requests, 1, 1)),)
    return GradBlocks(
        lines,
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        np.array(items, np.int64).reshape(-1, 2),
        -(-(dim + inputs.value_dim) // THREADS) * THREADS,
        max(leaves).bit_length() + 3,  # one a level, the families, and the one that is made
        (
            ("tk_grad_rows", (rows, -(-heads // THREADS), 1)),
            ("tk_grad_queries", (rows, inputs.kv_heads, group)),
            ("tk_grad_keys", (len(items), inputs.kv_heads, 1)),
            *sinks,
        ),
    )


def gpu_grad_arguments(
    backward: Backward, rows: Partials, cut: GradBlocks, place: Place, results: Gradients
) -> tuple[GpuGradArgs, tuple[npt.NDArray[Any], ...]]:
    """Return the arguments of the kernels of a backward and the arrays that they write between them."""
    inputs = backward.inputs
    count, heads, _ = inputs.q.shape
    width = max(GRAD_KEYS * cut.stride, heads)
    blocks_of = max(count * heads, len(cut.items) * inputs.kv_heads, len(cut.first) - 1, 1)
    room = (
        np.zeros((max(count * heads, 1), _END_BYTES), np.uint8),
        np.zeros(max(count * heads, 1), np.float32),
        np.zeros((blocks_of, cut.depth, width), np.float32),
    )
    end, delta, nodes = map(place, room)
    args = GpuGradArgs(
        g=grad_arguments(backward, rows, results, place),
        end=end,
        delta=delta,
        lines=place(cut.lines),
        first=place(cut.first),
        items=place(cut.items),
        nodes=nodes,
        depth=cut.depth,
        width=width,
        stride=cut.stride,
        group=heads // inputs.kv_heads,
    )
    return args, room
