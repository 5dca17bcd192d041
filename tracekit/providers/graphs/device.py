"""CUDA and HIP graphs, through torch's interface to both. Not run: it needs a GPU.

torch serves HIP under the same names (`torch.cuda`). Kernels that a provider launches itself belong on
`torch.cuda.current_stream()`, which inside of a capture is the stream that is captured.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from tracekit.errors import ProviderFailed, Unavailable
from tracekit.providers.graphs.base import Graph
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.placement import Fill

WARM_UPS = 3
"""As torch does it: compilation, tuning and the first growth of workspaces take up to three runs."""

_SIZES = (1 << 12, 1 << 20, 1 << 24)
"""Elements of unrelated tensors: small, large and very large blocks of the caching allocator."""


class DeviceGraphs:
    """The backend of CUDA and HIP.

    Args:
        cuda: `torch.cuda`, or what has its functions.
        device: where unrelated tensors lie.

    Raises:
        Unavailable: `P-DEVICE`, torch is not installed or sees no device.
    """

    kind = GraphKind.DEVICE

    def __init__(self, cuda: Any = None, device: str = "cuda") -> None:
        try:
            import torch
        except ImportError as error:
            raise Unavailable("a device graph needs torch; none is installed.", rule="P-DEVICE") from error
        self._torch, self._cuda, self._device = torch, cuda or torch.cuda, device
        if not self._cuda.is_available():
            raise Unavailable("there is no CUDA or HIP device that torch can use.", rule="P-DEVICE")

    def pool(self) -> Any:
        """Return a handle of memory that belongs to captures alone."""
        return self._cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run it on a stream of its own, as torch asks for before a capture."""
        stream = self._cuda.Stream()
        stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        self._cuda.current_stream().wait_stream(stream)

    @contextmanager
    def sync_guard(self) -> Iterator[None]:
        """Let torch raise where an operator waits for the device."""
        before = self._cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode")  # that it is a prototype
            self._cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self._cuda.set_sync_debug_mode(before)

    def capture(self, work: Callable[[], None], pool: Any) -> Graph:
        """Capture what is launched on the current stream.

        Raises:
            ProviderFailed: `P-GRAPH`, with what torch said; also where nothing was launched.
        """
        self.wait()
        graph: Graph = self._cuda.CUDAGraph()
        try:
            # The guard inside: entering a capture waits for the device, on purpose.
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "The CUDA Graph is empty")  # torch only warns
                with self._cuda.graph(graph, pool=pool), self.sync_guard():
                    work()
        except (RuntimeError, UserWarning) as error:
            raise ProviderFailed(f"the launch cannot be captured: {error}", rule="P-GRAPH") from error
        return graph

    def scratch(self, fill: Fill) -> AbstractContextManager[None]:
        """Nothing: what a capture allocates is its own; `StaticLaunch.poison` fills what a launch holds."""
        return nullcontext()

    def unrelated(self, pool: Any, fill: Fill) -> None:
        """Take blocks of several sizes from the allocator, multiply in them, and give them back full."""
        number = float("nan") if fill is Fill.NANS else -2.87e-16  # 0xA5A5A5A5
        taken = [self._torch.full((size,), number, device=self._device) for size in _SIZES]
        square = taken[1].view(1 << 10, 1 << 10)
        self._torch.mm(square, square)
        self.wait()

    def wait(self) -> None:
        """Wait for the device: what is read afterwards is what was launched before."""
        self._cuda.synchronize()
