"""The GPU body of TKA-1 without a GPU: on the host, thread by thread, and as the PTX of nvcc."""

import ctypes
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.portability import ptx
from tracekit.providers.graphs.host import launch
from tracekit.providers.tka1 import Inputs, Outputs, Partials
from tracekit.providers.tka1.abi import THREADS, GpuArgs, answer, blocks, gpu_arguments, workspace
from tracekit.providers.tka1.abi_backward import gpu_grad_arguments, grad_blocks
from tracekit.providers.tka1.gradients import Backward, Gradients, room
from tracekit.providers.tka1.inputs import DTYPES

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
HOST_FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread")
CUDA_FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-ftz=false")


def host_body(folder: Path, kernels: Path = KERNELS, compiler: str = "c++") -> "HostBody":
    """Compile the body for this processor."""
    path = folder / "libtk_block.so"
    source = str(HERE / "block_host.cpp")
    command = [compiler, *HOST_FLAGS, f"-I{kernels}", "-fPIC", "-shared", source, "-o", str(path)]
    subprocess.run(command, check=True)
    return HostBody(ctypes.CDLL(str(path)))


class HostBody:
    """The body as loops over threads; `order` is that of the threads between two barriers."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self.handle = handle
        handle.tk_block_run.restype = None

    def run(self, inputs: Inputs, order: int = 0) -> tuple[Outputs, Partials]:
        """Compute a launch: order 0 is forward, 1 reversed, 2 and more are shuffled with that seed."""
        out, part, results = answer(inputs)
        keep: list[npt.NDArray[Any]] = []

        def place(array: npt.NDArray[Any]) -> int:
            keep.append(array)
            return array.ctypes.data

        cut = blocks(inputs)
        args = gpu_arguments(inputs, cut, place, results, workspace(inputs, cut))
        self.handle.tk_block_run(ctypes.byref(args), order)
        return out, part

    def backward(self, backward: Backward, order: int = 0) -> Gradients:
        """Compute gradients; the order as above."""
        keep: list[npt.NDArray[Any]] = []

        def place(array: npt.NDArray[Any]) -> int:
            keep.append(array)
            return array.ctypes.data

        rows = self.run(backward.inputs)[1] if backward.rows is None else backward.rows
        cut, grads = grad_blocks(backward), room(backward)
        args, between = gpu_grad_arguments(backward, rows, cut, place, grads)
        keep.extend(between)
        self.handle.tk_block_backward(ctypes.byref(args), len(cut.items), order)
        return grads


def nvcc() -> str | None:
    """The CUDA compiler, if there is one."""
    return shutil.which("nvcc")


def compile_ptx(folder: Path, kernels: Path = KERNELS) -> "PtxBody":
    """Compile the kernels to PTX, one text a dtype."""
    texts = []
    for number, dtype in enumerate(DTYPES):
        path = folder / f"{dtype}.ptx"
        options = [*CUDA_FLAGS, f"-DTK_FIXED_TYPE={number}", "-arch=sm_80", "-ptx"]
        subprocess.run(
            [str(nvcc()), *options, str(kernels / "tk_gpu.cu"), "-o", str(path)],
            check=True,
            capture_output=True,
        )
        texts.append(path.read_text())
    return PtxBody(texts)


class PtxBody:
    """The kernels as PTX, interpreted; `counts` says how many of each instruction were done."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self.counts: Counter[str] = Counter()

    def backward(self, backward: Backward, rows: Partials) -> Gradients:
        """Compute gradients from the rows before S10."""
        cut, grads, memory = grad_blocks(backward), room(backward), ptx.Memory()
        args, between = gpu_grad_arguments(backward, rows, cut, memory.place, grads)
        memory.load()
        text = self.texts[DTYPES.index(backward.inputs.dtype)]
        for name, grid in cut.grids:
            self.counts.update(ptx.launch(ptx.parse(text, name), grid, THREADS, bytes(args), memory))
        memory.store()
        del between
        return grads

    def run(self, inputs: Inputs, order: int = 0) -> tuple[Outputs, Partials]:
        """Compute a launch; there is one order."""
        del order
        out, part, results = answer(inputs)
        cut, memory = blocks(inputs), ptx.Memory()
        args = gpu_arguments(inputs, cut, memory.place, results, workspace(inputs, cut))
        memory.load()
        text = self.texts[DTYPES.index(inputs.dtype)]
        for name, grid in cut.kernels:
            self.counts.update(ptx.launch(ptx.parse(text, name), grid, THREADS, bytes(args), memory))
        memory.store()
        return out, part


class HostLauncher:
    """Stands in for loaded code: both kernels as loops on the host, once the second is launched."""

    def __init__(self, body: HostBody, order: int = 0) -> None:
        self.body, self.order = body, order

    def launch(self, kernel: str, grid: object, threads: int, block: ctypes.Structure, stream: int) -> None:
        """Run them; see `tka1_device.Launcher`."""
        if kernel == "tk_merge":
            launch(self.body.handle.tk_block_run, block, self.order)


class PtxLauncher:
    """Stands in for loaded code: each kernel as PTX, interpreted over its grid in the memory of `arena`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.arena: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def launch(
        self, kernel: str, grid: tuple[int, int, int], threads: int, block: ctypes.Structure, stream: int
    ) -> None:
        """Interpret one; see `tka1_device.Launcher`."""
        memory = ptx.Memory(self.arena.ctypes.data)
        memory.bytes = self.arena
        ptx.launch(ptx.parse(self.text, kernel), grid, threads, bytes(block), memory)


def halves(both: Callable[[Inputs], tuple[Outputs, Partials]]) -> tuple[Any, Any]:
    """Return (run, partials) of a form that computes both at once, as the self-test wants them."""
    return (lambda inputs, _: both(inputs)[0]), (lambda inputs, _: both(inputs)[1])


__all__ = [
    "GpuArgs",
    "HostBody",
    "HostLauncher",
    "PtxBody",
    "PtxLauncher",
    "compile_ptx",
    "halves",
    "host_body",
    "nvcc",
]
