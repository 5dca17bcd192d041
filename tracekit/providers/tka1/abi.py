"""The arguments of a launch as kernels/tk_args.h and kernels/tk_block.h lay them out, host and device."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.errors import Unsupported
from tracekit.providers.tka1.inputs import DTYPES, LEAF, FamilyInput, Inputs, Lists, Outputs, Partials, Ranges

Place = Callable[[npt.NDArray[Any]], int]
"""Says at which address an array lies for whoever runs the launch, and keeps it there until that is over."""


class Family(ctypes.Structure):
    """`tk_family` of kernels/tk_args.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("requests", "ids", "offsets", "lo", "hi"))


class Args(ctypes.Structure):
    """`tk_args` of kernels/tk_args.h."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("q", "request", "sink", "out", "lse", "lse_sink", "acc", "l", "m")),
        ("family", Family * 2),
        *((n, ctypes.c_int32) for n in ("families", "rows", "heads", "kv_heads", "dim", "value_dim", "type")),
        ("scale", ctypes.c_uint32),
    )


def arguments(inputs: Inputs, place: Place, results: Mapping[str, npt.NDArray[Any]]) -> Args:
    """Return the arguments of a launch; `results` are its outputs, by the names of `Args`."""
    rows, heads, dim = inputs.q.shape
    families = [_family(f, place) for f in inputs.families] + [Family()] * (2 - len(inputs.families))
    return Args(
        q=place(inputs.q),
        request=place(inputs.request),
        sink=None if inputs.sink is None else place(inputs.sink),
        family=(Family * 2)(*families),
        families=len(inputs.families),
        rows=rows,
        heads=heads,
        kv_heads=inputs.kv_heads,
        dim=dim,
        value_dim=inputs.value_dim,
        type=DTYPES.index(inputs.dtype),
        scale=inputs.scale_bits,
        **{name: place(array) for name, array in results.items()},
    )


def _family(family: FamilyInput, place: Place) -> Family:
    table = [
        (place(k), place(v), first)
        for k, v, first in zip(family.keys, family.values, family.first, strict=True)
    ]
    requests = place(np.array(table, np.int64))  # tk_rows: two pointers and a number
    selection = family.selection
    if isinstance(selection, Lists):
        # An empty list still needs an address: null means ranges.
        ids = selection.ids if selection.ids.size else np.zeros(1, np.int64)
        return Family(requests=requests, ids=place(ids), offsets=place(selection.offsets))
    return Family(requests=requests, lo=place(selection.lo), hi=place(selection.hi))


def answer(inputs: Inputs) -> tuple[Outputs, Partials, dict[str, npt.NDArray[Any]]]:
    """Return empty outputs and partials of a launch, and the same arrays by the names of its arguments."""
    rows, heads, _ = inputs.q.shape
    wide, flat = (rows, heads, inputs.value_dim), (rows, heads)
    out = Outputs(
        np.zeros(wide, inputs.dtype.container), np.zeros(flat, np.uint32), np.zeros(flat, np.uint32)
    )
    part = Partials(np.zeros(wide, np.uint32), np.zeros(flat, np.uint32), np.zeros(flat, np.int32))
    names = {"out": out.out, "lse": out.lse, "lse_sink": out.lse_with_sink}
    return out, part, names | {"acc": part.acc, "l": part.l, "m": part.m}


# ---- on a device: blocks, and the partials between its two kernels

RUN_LEVEL = 3
"""TK_RUN_LEVEL: a block walks 2^3 leaves."""

THREADS = 128
"""TK_THREADS: of a block."""

_KERNELS = ((128, "tk_run_128", 4), (512, "tk_run_512", 8))
"""Largest Dv, name, and query heads of a block (kernels/tk_gpu.cu)."""


class GpuArgs(ctypes.Structure):
    """`tk_gpu_args` of kernels/tk_block.h."""

    _fields_ = (
        ("a", Args),
        *((n, ctypes.c_void_p) for n in ("acc", "l", "m")),
        ("first", ctypes.c_int32 * 2),
        ("count", ctypes.c_int32 * 2),
        *((n, ctypes.c_int32) for n in ("runs", "group", "parts")),
        ("parts_inverse", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Blocks:
    """How a launch is cut into blocks.

    Args:
        kernel: name of the first kernel; `tk_merge` is the second.
        heads: query heads of a block.
        first: by family, the first run of leaves that some row sees.
        count: by family, how many runs from there on.
        run_grid: blocks of the first kernel.
        merge_grid: blocks of the second.
    """

    kernel: str
    heads: int
    first: tuple[int, int]
    count: tuple[int, int]
    run_grid: tuple[int, int, int]
    merge_grid: tuple[int, int, int]

    @property
    def runs(self) -> int:
        """Runs of all families."""
        return sum(self.count)

    @property
    def kernels(self) -> tuple[tuple[str, tuple[int, int, int]], ...]:
        """The kernels of the launch in order, with their grids; one without blocks is left out."""
        both = ((self.kernel, self.run_grid), ("tk_merge", self.merge_grid))
        return tuple((name, grid) for name, grid in both if min(grid) > 0)


def blocks(inputs: Inputs, *more: Inputs) -> Blocks:
    """Cut a launch.

    Args:
        inputs: the launch.
        more: launches of the same shape that are cut in the same way: the runs then hold the keys of all.

    Raises:
        Unsupported: `K-VALUE-DIM` for a Dv above 512, `K-GRID` for more blocks than a grid takes.
    """
    fitting = [(name, heads) for width, name, heads in _KERNELS if inputs.value_dim <= width]
    if not fitting:
        raise Unsupported(
            f"Dv is {inputs.value_dim}; the GPU kernels hold up to {_KERNELS[-1][0]} columns. The CPU forms "
            "take any.",
            rule="K-VALUE-DIM",
        )
    name, heads = fitting[0]
    spans = [
        _runs([one.families[f].selection for one in (inputs, *more)]) for f in range(len(inputs.families))
    ]
    spans += [(0, 0)] * (2 - len(spans))
    first, count = (spans[0][0], spans[1][0]), (spans[0][1], spans[1][1])
    rows, all_heads, _ = inputs.q.shape
    parts = -(-(all_heads // inputs.kv_heads) // heads)
    run_grid = (rows, inputs.kv_heads * parts, sum(count))
    if max(*run_grid[1:], all_heads) > _MOST:
        raise Unsupported(
            f"the launch needs {run_grid[1]} x {run_grid[2]} blocks a row; a grid takes up to {_MOST} "
            "of either. Cut the launch, or use `tka1` on the CPU.",
            rule="K-GRID",
        )
    return Blocks(name, heads, first, count, run_grid, (rows, all_heads, 1))


_MOST = 65535
"""Blocks in the second and third dimension of a grid, of CUDA and of HIP."""

Room = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int32]]


def workspace(inputs: Inputs, cut: Blocks) -> Room:
    """Return arrays for the partials between the two kernels; a device only needs to have as much memory."""
    rows, heads, _ = inputs.q.shape
    shape = (rows, max(cut.runs, 1), heads)
    wide = np.zeros((*shape, inputs.value_dim), np.float32)
    return wide, np.zeros(shape, np.float32), np.zeros(shape, np.int32)


def gpu_arguments(
    inputs: Inputs, cut: Blocks, place: Place, results: Mapping[str, npt.NDArray[Any]], room: Room
) -> GpuArgs:
    """Return the arguments of both kernels; `room` is the workspace."""
    acc, l, m = map(place, room)  # noqa: E741 - the name in the specification
    pair = ctypes.c_int32 * 2
    parts = cut.run_grid[1] // inputs.kv_heads
    return GpuArgs(
        a=arguments(inputs, place, results),
        acc=acc,
        l=l,
        m=m,
        first=pair(*cut.first),
        count=pair(*cut.count),
        runs=cut.runs,
        group=inputs.q.shape[1] // inputs.kv_heads,
        parts=parts,
        parts_inverse=-(-(2**32) // parts),
    )


def _runs(selections: Sequence[Ranges | Lists]) -> tuple[int, int]:
    """(first, count) of the runs that hold every key that some row sees."""
    spans = [span for span in map(_span, selections) if span[0] < span[1]]
    if not spans:
        return 0, 0
    size = LEAF << RUN_LEVEL
    first = min(low for low, _ in spans) // size
    return first, -(-max(high for _, high in spans) // size) - first


def _span(selection: Ranges | Lists) -> tuple[int, int]:
    """[low, high) of the row ids that some row sees."""
    if isinstance(selection, Lists):
        ids = selection.ids
        return (int(ids.min()), int(ids.max()) + 1) if ids.size else (0, 0)
    seen = selection.lo < selection.hi
    if not seen.any():
        return 0, 0
    return int(selection.lo[seen].min()), int(selection.hi[seen].max())
