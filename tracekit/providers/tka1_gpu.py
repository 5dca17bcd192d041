"""`tka1-cuda` and `tka1-hip`: TKA-1 on a GPU, compiled where it runs, by the libraries that torch brings.

A device answers only after the self-test ran on it: until then nobody knows whether its bits are those of
the definition, and a failed self-test makes every claim inconclusive (docs/tka1.md, "On a GPU"). The
identity is that of `tka1`, because the bits are: `recorded` on a trace of `tka1` compares device and CPU.
"""

from functools import cache
from typing import ClassVar

from tracekit.errors import Unavailable
from tracekit.model import AttentionCall, Bits, DType
from tracekit.providers.base import Tensors
from tracekit.providers.placement import Fill
from tracekit.providers.portable import Tka1, inputs
from tracekit.providers.tka1 import DTYPES, Inputs, Outputs, Partials, selftest
from tracekit.providers.tka1.driver import Code, Driver, Vendor, open_driver
from tracekit.providers.tka1.runtime_compiler import Compiler, Kind, open_compiler
from tracekit.verdict import ClaimId

_COMPILERS: dict[Vendor, Kind] = {"cuda": "nvrtc", "hip": "hiprtc"}
_WIDEST = 512


class Device:
    """The GPU that torch uses here, with its driver and its compiler.

    Args:
        vendor: `cuda` or `hip`.

    Raises:
        Unavailable: `P-TORCH` without torch, `P-DEVICE` without such a GPU, `K-NO-DRIVER`, `K-NO-COMPILER`.
    """

    def __init__(self, vendor: Vendor) -> None:
        self.vendor: Vendor = vendor
        self.arch, self.name, self.index = _torch_device(vendor)
        _make_current(self.torch_name)
        self.driver: Driver = open_driver(vendor)
        self.compiler: Compiler = open_compiler(_COMPILERS[vendor])
        self._code: dict[DType, Code] = {}

    @property
    def torch_name(self) -> str:
        """As torch names it; torch calls AMD's devices `cuda` too."""
        return f"cuda:{self.index}"

    def code(self, dtype: DType) -> Code:
        """Return the kernels for a dtype, compiled at first use and kept (`runtime_compiler`)."""
        if dtype not in self._code:
            self._code[dtype] = self.driver.load(self.compiler.code(self.arch, DTYPES.index(dtype)))
        return self._code[dtype]

    def run(self, launch: Inputs, fill: Fill | None = None) -> tuple[Outputs, Partials]:
        """Compute one launch; with `fill` between canaries.

        Raises:
            ProviderFailed: `K-DRIVER`, `K-COMPILE`, or `P-CANARY`.
            Unsupported: `K-VALUE-DIM`, `K-GRID`.
        """
        from tracekit.providers.tka1_device import DeviceLaunch

        prepared = DeviceLaunch(
            self.code(launch.dtype), [launch], self.torch_name, partials=fill is None, fill=fill
        )
        prepared.load(launch)
        prepared.enqueue()
        answer = prepared.read()
        if fill is not None:
            prepared.check()
        return answer


@cache
def verified(vendor: Vendor) -> Device:
    """Return the device of this process after its self-test: it is bit-verified.

    Raises:
        ProviderFailed: `K-SELFTEST` and what `Device.run` raises.
        Unavailable: as `Device`.
    """
    device = Device(vendor)
    selftest.check(
        lambda launch, _: device.run(launch)[0],
        lambda launch, _: device.run(launch)[1],
        f"{device.name} ({device.arch}, {device.compiler.kind} {device.compiler.version})",
        "Use `tka1` on the CPU",
    )
    return device


class Tka1Cuda(Tka1):
    """TKA-1 on the CUDA device that torch uses."""

    id = "tka1-cuda"
    vendor: ClassVar[Vendor] = "cuda"

    def __init__(self) -> None:
        _torch_device(self.vendor)

    def advertised(self) -> frozenset[ClaimId]:
        """As `tka1`; threads are those of a host."""
        return super().advertised() - {"threads"} | {"after"}

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why it cannot run a call."""
        if call.value_dim > _WIDEST:
            return f"it does not take values of {call.value_dim} columns (up to {_WIDEST})"
        return super().refuses(call)

    def _attend(self, call: AttentionCall, threads: int, fill: Fill | None) -> Tensors:
        answer = verified(self.vendor).run(inputs(call), fill)[0]
        return Tensors(Bits(answer.out, call.dtype), Bits(answer.lse, DType.FLOAT32))


class Tka1Hip(Tka1Cuda):
    """TKA-1 on the HIP device that torch uses."""

    id = "tka1-hip"
    vendor: ClassVar[Vendor] = "hip"


def _make_current(name: str) -> None:
    """Let the driver find the device of this thread: torch makes it current when it first uses it."""
    import torch

    torch.zeros(1, device=name)


def _torch_device(vendor: Vendor) -> tuple[str, str, int]:
    """Return architecture, name and index of the current device of torch.

    Raises:
        Unavailable: `P-TORCH` or `P-DEVICE`.
    """
    try:
        import torch
    except ImportError as error:
        raise Unavailable(
            f"tka1-{vendor} needs torch for memory and streams; install torch for {vendor.upper()}.",
            rule="P-TORCH",
        ) from error
    hip = getattr(torch.version, "hip", None) is not None
    if not torch.cuda.is_available() or hip is not (vendor == "hip"):
        raise Unavailable(
            f"torch {torch.__version__} sees no {vendor.upper()} device here; `tka1` gives the same bits on "
            "the CPU.",
            rule="P-DEVICE",
            vendor=vendor,
        )
    index = torch.cuda.current_device()
    found = torch.cuda.get_device_properties(index)
    if hip:
        return str(found.gcnArchName).split(":")[0], str(found.name), index
    return f"sm_{found.major}{found.minor}", str(found.name), index
