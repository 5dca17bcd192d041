"""Load device code and launch it through the driver of CUDA or HIP, by ctypes: no toolkit, no torch.

Both drivers have the same calls under two names. A device must be current in the calling thread, as it is
once torch has used it; a launch goes to the stream that it is given, and is captured where that stream is.
"""

import ctypes
import ctypes.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tracekit.errors import ProviderFailed, Unavailable

Vendor = Literal["cuda", "hip"]

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class _Calls:
    """Where the driver of a vendor is, and what its calls are named."""

    files: tuple[str, ...]
    load: str
    function: str
    launch: str
    version: str
    error: str


_CALLS: dict[Vendor, _Calls] = {
    "cuda": _Calls(
        ("libcuda.so.1",),
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuDriverGetVersion",
        "cuGetErrorName",
    ),
    "hip": _Calls(
        ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"),
        "hipModuleLoadData",
        "hipModuleGetFunction",
        "hipModuleLaunchKernel",
        "hipDriverGetVersion",
        "hipGetErrorName",
    ),
}


@dataclass(frozen=True, eq=False)
class Driver:
    """An opened driver.

    Args:
        vendor: whose.
        handle: the library.
    """

    vendor: Vendor
    handle: Any

    @property
    def version(self) -> str:
        """The version as its number says it: `13000` of CUDA is 13.0."""
        number = ctypes.c_int()
        self._call(_CALLS[self.vendor].version, ctypes.byref(number))
        return str(number.value)

    def load(self, code: bytes) -> "Code":
        """Load a cubin or a code object onto the device that is current in this thread.

        Raises:
            ProviderFailed: `K-DRIVER`, with the driver's name of the error.
        """
        module = ctypes.c_void_p()
        self._call(_CALLS[self.vendor].load, ctypes.byref(module), ctypes.c_char_p(code))
        return Code(self, module)

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """Return an entry of a module; errors as `load`."""
        found = ctypes.c_void_p()
        self._call(_CALLS[self.vendor].function, ctypes.byref(found), module, name.encode())
        return found

    def launch(
        self, function: ctypes.c_void_p, grid: Grid, threads: int, block: ctypes.Structure, stream: int
    ) -> None:
        """Launch an entry whose one parameter is a structure, passed by value; errors as `load`.

        Args:
            function: the entry.
            grid: blocks.
            threads: of a block, in one dimension.
            block: the parameter; the driver copies it before this returns.
            stream: as torch names it (`cuda_stream`), 0 for the default one.
        """
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        numbers = (ctypes.c_uint(x) for x in (*grid, threads, 1, 1, 0))  # no dynamic shared memory
        self._call(_CALLS[self.vendor].launch, function, *numbers, ctypes.c_void_p(stream), parameters, None)

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self.handle, name)(*arguments)
        if result:
            raise ProviderFailed(
                f"{name} ended with {self._error(result)}; see what the driver says of this device "
                "(nvidia-smi, rocm-smi).",
                rule="K-DRIVER",
                result=result,
            )

    def _error(self, result: int) -> str:
        call = getattr(self.handle, _CALLS[self.vendor].error)
        if self.vendor == "hip":
            call.restype = ctypes.c_char_p
            return (call(result) or b"").decode() or str(result)
        text = ctypes.c_char_p()
        call(result, ctypes.byref(text))
        return (text.value or b"").decode() or str(result)


@dataclass(frozen=True, eq=False)
class Code:
    """Loaded code; its entries are looked up once."""

    driver: Driver
    module: ctypes.c_void_p
    _entries: dict[str, ctypes.c_void_p] = field(default_factory=dict)

    def launch(self, kernel: str, grid: Grid, threads: int, block: ctypes.Structure, stream: int) -> None:
        """Launch the entry `kernel`; arguments and errors as `Driver.launch`."""
        if kernel not in self._entries:
            self._entries[kernel] = self.driver.function(self.module, kernel)
        self.driver.launch(self._entries[kernel], grid, threads, block, stream)


def candidates(vendor: Vendor, folders: Iterable[str] | None = None) -> list[str]:
    """Return the names by which the driver may be found: of torch's ROCm wheels first, then the system's."""
    names = list(_CALLS[vendor].files)
    if vendor == "cuda":  # it comes with the kernel module and never with a package
        return names
    packaged = [
        str(found)
        for folder in (sys.path if folders is None else folders)
        for found in sorted(Path(folder or ".").glob("torch/lib/libamdhip64.so*"))
    ]
    return [*packaged, *names]


def open_driver(vendor: Vendor, names: Iterable[str] | None = None) -> Driver:
    """Open the driver.

    Raises:
        Unavailable: `K-NO-DRIVER` where there is none.
    """
    for name in candidates(vendor) if names is None else names:
        try:
            return Driver(vendor, ctypes.CDLL(name))
        except OSError:
            continue
    raise Unavailable(
        f"there is no driver of {vendor.upper()} on this machine ({_CALLS[vendor].files[0]}); TKA-1 on a GPU "
        "needs the driver of that GPU, and `tka1` gives the same bits on the CPU.",
        rule="K-NO-DRIVER",
        vendor=vendor,
    )
