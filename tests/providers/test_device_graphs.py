"""CUDA and HIP graphs as far as a machine without a GPU shows them. No graph is captured or replayed here.

What runs is the order of calls into torch, on a stand-in for `torch.cuda` that writes them down, and that the
installed torch has what is called.
"""

import inspect
import warnings
from contextlib import contextmanager

import pytest
import torch

from tracekit.errors import ProviderFailed, Unavailable
from tracekit.providers.graphs.device import WARM_UPS, DeviceGraphs
from tracekit.providers.placement import Fill

without_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")


class Written:
    """What `DeviceGraphs` uses of `torch.cuda`; it writes down what is called."""

    def __init__(self, captures=True):
        self.calls, self.mode, self.captures = [], 0, captures

    def is_available(self):
        return True

    def graph_pool_handle(self):
        return (0, 1)

    def synchronize(self):
        self.calls.append("wait")

    def side(self):
        return _Stream("side", self.calls)

    def current_stream(self):
        return _Stream("current", self.calls)

    @contextmanager
    def stream(self, stream):
        self.calls.append(f"on {stream.name}")
        yield
        self.calls.append(f"off {stream.name}")

    def get_sync_debug_mode(self):
        return self.mode

    def set_sync_debug_mode(self, mode):
        if mode == "error":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)  # as torch does
        self.mode = mode
        self.calls.append(f"sync {mode}")

    def empty(self):
        return _Graph(self.calls)

    @contextmanager
    def graph(self, graph, pool=None):
        self.calls.append(f"begin {pool}")
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        before = list(self.calls)
        yield
        if "work" not in self.calls[len(before) :]:
            warnings.warn("The CUDA Graph is empty. This usually means", stacklevel=1)  # as torch does
        self.calls.append("end")

    Stream, CUDAGraph = side, empty  # as torch writes them


class _Stream:
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")


class _Graph:
    def __init__(self, calls):
        self.calls = calls

    def replay(self):
        self.calls.append("replay")


def test_warm_up_runs_on_a_side_stream_that_both_ways_wait_for():
    cuda = Written()
    DeviceGraphs(cuda).warm_up(lambda: cuda.calls.append("work"))
    assert cuda.calls == [
        "side waits for current",
        "on side",
        *["work"] * WARM_UPS,
        "off side",
        "current waits for side",
    ]


def test_a_capture_is_guarded_and_the_guard_is_put_back():
    cuda = Written()
    backend = DeviceGraphs(cuda)
    graph = backend.capture(lambda: cuda.calls.append("work"), backend.pool())
    graph.replay()
    assert cuda.calls == ["wait", "begin (0, 1)", "sync error", "work", "sync 0", "end", "replay"]
    with pytest.raises(ZeroDivisionError), backend.sync_guard():
        1 // 0  # noqa: B018 - it raises
    assert cuda.mode == 0


def test_what_torch_says_against_a_capture_is_told():
    backend = DeviceGraphs(Written(captures=False))
    with pytest.raises(ProviderFailed, match="not permitted when stream is capturing") as error:
        backend.capture(lambda: None, backend.pool())
    assert error.value.rule == "P-GRAPH"


def test_a_capture_of_nothing_is_refused():
    """torch only warns of it; replayed, the answer of another launch would be read again."""
    backend = DeviceGraphs(Written())
    with pytest.raises(ProviderFailed, match="The CUDA Graph is empty") as error:
        backend.capture(lambda: None, backend.pool())
    assert error.value.rule == "P-GRAPH"


def test_unrelated_work_runs_and_is_waited_for():
    cuda = Written()
    DeviceGraphs(cuda, device="cpu").unrelated((0, 1), Fill.A5)
    assert cuda.calls == ["wait"]


@without_device
def test_without_a_device_it_says_so():
    with pytest.raises(Unavailable, match="no CUDA or HIP device") as error:
        DeviceGraphs()
    assert error.value.rule == "P-DEVICE"


def test_the_installed_torch_has_what_is_called():
    assert {"pool", "cuda_graph"} <= set(inspect.signature(torch.cuda.graph.__init__).parameters)
    for name in ("replay", "capture_begin", "capture_end", "pool"):
        assert callable(getattr(torch.cuda.CUDAGraph, name))
    for name in vars(Written).keys() - {"side", "empty"}:
        if not name.startswith("_"):
            assert callable(getattr(torch.cuda, name)), name
    assert callable(torch.cuda.Stream.wait_stream)
