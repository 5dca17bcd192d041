"""TKA-1 in C++, through ctypes: find the library, ask it once to prove itself, call it.

The libraries lie in `tracekit/_native/`. A development install keeps Python files and build results in two
folders, and both are in `tracekit.__path__`; so every entry is searched.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tracekit
from tracekit.errors import ProviderFailed, Unavailable
from tracekit.model.bits import DType
from tracekit.providers.graphs.host import launch
from tracekit.providers.guarded import Guarded, filled_heap
from tracekit.providers.placement import Fill
from tracekit.providers.tka1 import selftest
from tracekit.providers.tka1.abi import Args, arguments
from tracekit.providers.tka1.abi_backward import GradArgs, grad_arguments
from tracekit.providers.tka1.gradients import Backward, Gradients, room
from tracekit.providers.tka1.inputs import Inputs, Outputs, Partials
from tracekit.providers.tka1.schedules import Ran, Schedule

BASELINE = "v1"
BUILDS = {"v4": 4, "v3": 3, "v1": 1}
"""Builds, best first, and the number by which a processor says that it can run them."""


Where = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
"""Says in which array a launch finds one of its own: itself, or a copy somewhere else."""


def _as_it_is(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array


@dataclass(frozen=True, eq=False)
class Library:
    """One loaded build that has passed its self-test.

    Args:
        path: the file.
        isa: `v1`, `v3` or `v4`.
        handle: the open library.
    """

    path: Path
    isa: str
    handle: ctypes.CDLL

    def run(self, inputs: Inputs, threads: int = 1) -> Outputs:
        """Compute a launch on up to `threads` threads; the number changes no bit (S15)."""
        return self._outputs(self.handle.tka1_run, inputs, threads)

    def run_as(self, inputs: Inputs, threads: int, schedule: Schedule) -> tuple[Outputs, str | None]:
        """Compute a launch in a schedule, which changes no bit; say what ran, None if it was another."""
        ran = Ran()
        more = ctypes.byref(schedule), ctypes.byref(ran)
        out = self._outputs(self.handle.tka1_run_as, inputs, threads, *more)
        return out, str(ran) if ran.followed(schedule) else None

    def guarded(self, inputs: Inputs, threads: int, fill: Fill) -> Outputs:
        """Compute a launch whose buffers lie between canaries, over a filled heap (`Guarded`).

        Raises:
            ProviderFailed: `P-CANARY` where it wrote into an input or beside a buffer.
        """
        memory, (rows, heads, _) = Guarded(fill), inputs.q.shape
        out = Outputs(
            memory.empty((rows, heads, inputs.value_dim), inputs.dtype, "O"),
            memory.empty((rows, heads), DType.FLOAT32, "the LSE"),
            memory.empty((rows, heads), DType.FLOAT32, "the LSE with the sink"),
        )
        results = {"out": out.out, "lse": out.lse, "lse_sink": out.lse_with_sink}
        moved = {id(array): array for array in results.values()}

        def place(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            if id(array) not in moved:
                moved[id(array)] = memory.held(array, inputs.dtype if array.itemsize == 2 else None)
            return moved[id(array)]

        with filled_heap(fill):
            self._call(self.handle.tka1_run, inputs, threads, place, **results)
        memory.check()
        return out

    def partials(self, inputs: Inputs, threads: int = 1) -> Partials:
        """Compute the rows before S10."""
        return self._partials(self.handle.tka1_run, inputs, threads)

    def training(self, inputs: Inputs, threads: int = 1) -> tuple[Outputs, Partials]:
        """Compute a launch and keep its rows before S10, in one pass."""
        out, part = _outputs(inputs), _partials(inputs)
        results = {"out": out.out, "lse": out.lse, "lse_sink": out.lse_with_sink}
        results |= {"acc": part.acc, "l": part.l, "m": part.m}
        self._call(self.handle.tka1_run, inputs, threads, _as_it_is, **results)
        return out, part

    def backward(self, backward: Backward, threads: int = 1) -> Gradients:
        """Compute the gradients of a launch (S16)."""
        rows = self.partials(backward.inputs, threads) if backward.rows is None else backward.rows
        grads = room(backward)
        keep: list[npt.NDArray[Any]] = []

        def place(array: npt.NDArray[Any]) -> int:
            keep.append(array)
            return array.ctypes.data

        args = grad_arguments(backward, rows, grads, place)
        self.check(self.handle.tka1_backward(ctypes.byref(args), max(1, threads)))
        return grads

    def clear_run(self, inputs: Inputs, threads: int = 1) -> Outputs:
        """Compute a launch by the clear form (kernels/tk_clear.h), slowly and on one thread."""
        return self._outputs(self.handle.tka1_clear, inputs, threads)

    def clear_partials(self, inputs: Inputs, threads: int = 1) -> Partials:
        """Compute the rows before S10 by the clear form."""
        return self._partials(self.handle.tka1_clear, inputs, threads)

    def _outputs(self, entry: Any, inputs: Inputs, threads: int, *more: Any) -> Outputs:
        out = _outputs(inputs)
        results = {"out": out.out, "lse": out.lse, "lse_sink": out.lse_with_sink}
        self._call(entry, inputs, threads, _as_it_is, *more, **results)
        return out

    def _partials(self, entry: Any, inputs: Inputs, threads: int) -> Partials:
        part = _partials(inputs)
        self._call(entry, inputs, threads, _as_it_is, acc=part.acc, l=part.l, m=part.m)
        return part

    def _call(
        self, entry: Any, inputs: Inputs, threads: int, where: Where, *more: Any, **results: npt.NDArray[Any]
    ) -> None:
        keep: list[npt.NDArray[Any]] = []

        def place(array: npt.NDArray[Any]) -> int:
            # The array itself too: another one must not get its id while the launch is made.
            keep.extend((array, where(array)))
            return keep[-1].ctypes.data

        args = arguments(inputs, place, results)
        self.check(launch(entry, args, max(1, threads), *more, memory=tuple(keep)))

    def check(self, failed: int) -> None:
        """Refuse what a kernel returned where it is not 0.

        Raises:
            ProviderFailed: `K-MEMORY`.
        """
        if failed:
            raise ProviderFailed(
                f"{self.path.name} ran out of memory for a launch; cut the launch.",
                rule="K-MEMORY",
                library=str(self.path),
            )


def _outputs(inputs: Inputs) -> Outputs:
    rows, heads, _ = inputs.q.shape
    return Outputs(
        np.empty((rows, heads, inputs.value_dim), inputs.dtype.container),
        np.empty((rows, heads), np.uint32),
        np.empty((rows, heads), np.uint32),
    )


def _partials(inputs: Inputs) -> Partials:
    rows, heads, _ = inputs.q.shape
    return Partials(
        np.empty((rows, heads, inputs.value_dim), np.uint32),
        np.empty((rows, heads), np.uint32),
        np.empty((rows, heads), np.int32),
    )


def find(isa: str) -> Path | None:
    """Return the file of a build, or None where it was not built."""
    return _files(tuple(tracekit.__path__)).get(isa)


def available() -> list[str]:
    """Return the builds that exist and that this processor can run, best first."""
    files = _files(tuple(tracekit.__path__))
    return [isa for isa in BUILDS if isa in files and runs(isa)]


def runs(isa: str) -> bool:
    """Whether this processor can run a build, built or not; the baseline build knows."""
    return BUILDS[isa] <= _best(tuple(tracekit.__path__))


def absent(isa: str) -> str:
    """Say why a build cannot be run here; empty where it can."""
    if not runs(isa):
        return f"this machine does not run {isa}"
    return "" if isa in available() else f"{isa} was not built"


@cache
def _files(folders: tuple[str, ...]) -> dict[str, Path]:
    places = ((isa, Path(x) / "_native" / f"libtka1_{isa}.so") for isa in BUILDS for x in reversed(folders))
    return {isa: path for isa, path in places if path.is_file()}


@cache
def _best(folders: tuple[str, ...]) -> int:
    """The number of the best build for this processor; 0 without a baseline build to ask."""
    files = _files(folders)
    return int(_open(files[BASELINE]).tka1_best_isa()) if BASELINE in files else 0


def load(isa: str) -> Library:
    """Return a build, self-tested.

    Raises:
        Unavailable: `K-NO-LIBRARY` where it was not built or the processor cannot run it.
        ProviderFailed: `K-ABI` for a library of other sources, `K-SELFTEST` for wrong bits.
    """
    path = find(isa)
    if path is None or isa not in available():
        raise Unavailable(
            f"there is no TKA-1 build {isa} that this machine can run; it has {available() or 'none'}. "
            "The numpy form gives the same bits. `pip install` with a C++17 compiler builds the libraries.",
            rule="K-NO-LIBRARY",
            isa=isa,
            available=available(),
        )
    return load_file(path, isa)


@cache
def load_file(path: Path, isa: str) -> Library:
    """Open one library file and test it; errors as `load`."""
    library = Library(path, isa, _open(path))
    selftest.check(library.run, library.partials, str(path), backward=library.backward)
    return library


def _open(path: Path) -> ctypes.CDLL:
    handle = ctypes.CDLL(str(path))
    sizes = {"tka1_args_size": Args, "tka1_grad_args_size": GradArgs}
    complete = all(
        hasattr(handle, name) for name in ("tka1_run", "tka1_run_as", "tka1_clear", "tka1_backward")
    )
    if not complete or not all(_fits(handle, name, layout) for name, layout in sizes.items()):
        raise ProviderFailed(
            f"{path} was built from other sources than this tracekit; install again, or use the numpy form.",
            rule="K-ABI",
            library=str(path),
        )
    for entry in (handle.tka1_run, handle.tka1_clear):
        entry.argtypes = [ctypes.POINTER(Args), ctypes.c_int]
    handle.tka1_backward.argtypes = [ctypes.POINTER(GradArgs), ctypes.c_int]
    handle.tka1_run_as.argtypes = [
        ctypes.POINTER(Args),
        ctypes.c_int,
        ctypes.POINTER(Schedule),
        ctypes.POINTER(Ran),
    ]
    return handle


def _fits(handle: ctypes.CDLL, name: str, layout: type[ctypes.Structure]) -> bool:
    """Whether a library knows a structure, and with the size that it has here."""
    size = getattr(handle, name, None)
    if size is None:
        return False
    size.restype = ctypes.c_int64
    return bool(size() == ctypes.sizeof(layout))
