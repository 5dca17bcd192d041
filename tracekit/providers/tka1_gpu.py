"""`tka1-cuda` and `tka1-hip`: TKA-1 on a GPU, compiled where it runs, by the libraries that torch brings.

A device answers only after the self-test ran on it: until then nobody knows whether its bits are those of
the definition, and a failed self-test makes every claim inconclusive (docs/tka1.md, "On a GPU"). The
identity is that of `tka1`, because the bits are: `recorded` on a trace of `tka1` compares device and CPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from tracekit.errors import Unavailable, Unsupported
from tracekit.model import AttentionCall, Bits, DType, ExecutedIdentity
from tracekit.providers.base import Capabilities, Execution, Tensors
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.placement import Fill
from tracekit.providers.portable import Tka1, inputs
from tracekit.providers.tka1 import DTYPES, Inputs, Outputs, Partials, selftest
from tracekit.providers.tka1.driver import Code, Driver, Vendor, open_driver
from tracekit.providers.tka1.runtime_compiler import Compiler, Kind, open_compiler
from tracekit.verdict import ClaimId

if TYPE_CHECKING:
    from tracekit.providers.tka1_device import DeviceLaunch

_COMPILERS: dict[Vendor, Kind] = {"cuda": "nvrtc", "hip": "hiprtc"}
_WIDEST = 512
_OF_THE_CPU = ("splits", "cp", "tp", "grad", "backward")
"""Claims about partials and gradients, which no device gives yet."""


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
            code = self.compiler.code(self.arch, DTYPES.index(dtype))
            with _current(self.torch_name):
                self._code[dtype] = self.driver.load(code)
        return self._code[dtype]

    def launch(
        self, launches: Sequence[Inputs], *, fill: Fill | None = None, partials: bool = False
    ) -> "DeviceLaunch":
        """Return a launch with room for each of some; arguments and errors as `DeviceLaunch`."""
        from tracekit.providers.tka1_device import DeviceLaunch

        code = self.code(launches[0].dtype)
        return DeviceLaunch(code, launches, self.torch_name, partials=partials, fill=fill)

    def run(self, launch: Inputs, fill: Fill | None = None) -> tuple[Outputs, Partials]:
        """Compute one launch; with `fill` between canaries.

        Raises:
            ProviderFailed: `K-DRIVER`, `K-COMPILE`, or `P-CANARY`.
            Unsupported: `K-VALUE-DIM`, `K-GRID`.
        """
        prepared = self.launch([launch], fill=fill, partials=fill is None)
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

    def capabilities(self) -> Capabilities:
        """As `tka1`; its launches can be captured on the device. Ranks and gradients are those of the CPU."""
        graphs = frozenset({GraphKind.DEVICE})
        return replace(super().capabilities(), graphs=graphs, schedules=(), splits=False, grad=False)

    def advertised(self) -> frozenset[ClaimId]:
        """As `tka1`, with `graph`; threads, schedules and frozen calls are those of a host."""
        return super().advertised() - {"threads", "schedule", "host-graph", *_OF_THE_CPU} | {"after", "graph"}

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why it cannot run a call."""
        if call.value_dim > _WIDEST:
            return f"it does not take values of {call.value_dim} columns (up to {_WIDEST})"
        return super().refuses(call)

    def device(self) -> Device:
        """Return the device, verified."""
        return verified(self.vendor)

    def static(self, calls: Sequence[AttentionCall], execution: Execution, pool: object) -> "Resident":  # type: ignore[override]
        """Return a launch over memory of the device that stays (graphs/base.py); errors as `Tka1.static`."""
        for call in calls:
            if reason := self.refuses(call):
                raise Unsupported(f"{self.id} cannot run this call: {reason}.", rule="P-REFUSED")
        return Resident(self.device().launch(list(map(inputs, calls))), self)

    def _attend(self, call: AttentionCall, execution: Execution) -> tuple[Tensors, str | None]:
        fill = None if execution.placement is None else execution.placement.fill
        return tensors(self.device().run(inputs(call), fill)[0], call.dtype), None


class Tka1Hip(Tka1Cuda):
    """TKA-1 on the HIP device that torch uses."""

    id = "tka1-hip"
    vendor: ClassVar[Vendor] = "hip"


class Resident:
    """A launch that stays on the device, in the words of a provider.

    Args:
        launch: the launch.
        provider: who answers.
    """

    def __init__(self, launch: "DeviceLaunch", provider: Tka1Cuda) -> None:
        self.launch, self.provider = launch, provider
        self.enqueue, self.poison, self.changed = launch.enqueue, launch.poison, launch.changed

    def load(self, call: AttentionCall) -> None:
        """Write the inputs of a call into their places."""
        self.launch.load(inputs(call))

    def read(self) -> Tensors:
        """Return a copy of the answer."""
        return tensors(self.launch.read()[0], self.launch.dtype)

    def executed(self) -> ExecutedIdentity:
        """As an eager launch."""
        return self.provider.identity()


def tensors(out: Outputs, dtype: DType) -> Tensors:
    """Return an answer in the words of a provider."""
    return Tensors(Bits(out.out, dtype), Bits(out.lse, DType.FLOAT32))


@contextmanager
def _current(name: str) -> Iterator[None]:
    """Let the driver find a device in this thread: torch makes it current when it first uses it there."""
    import torch

    with torch.cuda.device(name):
        torch.zeros(1, device=name)
        yield


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
