"""The stand-in freezes calls as a device does: arguments by value, addresses as they were, no more."""

import ctypes

import numpy as np
import pytest
import torch

from tracekit.errors import ProviderFailed
from tracekit.providers.graphs import host
from tracekit.providers.graphs.host import HostGraphs
from tracekit.providers.graphs.pool import HostPool
from tracekit.providers.placement import Fill

INTS = ctypes.POINTER(ctypes.c_int64)


class Block(ctypes.Structure):
    """Two addresses and a length by value."""

    _fields_ = (("to", INTS), ("source", INTS), ("count", ctypes.c_int64))


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Block), ctypes.c_int)
def add(block, number):
    """to[i] = source[i] + number; a negative number is refused."""
    for i in range(block[0].count):
        block[0].to[i] = block[0].source[i] + number
    return int(number < 0)


def block(to, source, count):
    return Block(to.ctypes.data_as(INTS), source.ctypes.data_as(INTS), count)


def test_a_frozen_call_keeps_its_arguments_and_addresses():
    to, source, other = np.zeros(4, np.int64), np.arange(4), np.full(4, 50)
    backend = HostGraphs()
    arguments = block(to, source, 3)
    graph = backend.capture(lambda: host.launch(add, arguments, 10, memory=(to, source)), backend.pool())
    assert not to.any()  # a capture computes nothing

    graph.replay()
    assert to.tolist() == [10, 11, 12, 0]

    source += 100
    arguments.count, arguments.source = 4, other.ctypes.data_as(INTS)  # too late
    to[:] = -1
    graph.replay()
    assert to.tolist() == [110, 111, 112, -1]


def test_outside_of_a_capture_a_launch_is_a_call():
    to = np.zeros(2, np.int64)
    assert host.launch(add, block(to, to, 2), 1) == 0
    assert to.tolist() == [1, 1]
    assert host.launch(add, block(to, to, 2), -1) == 1


def test_a_capture_of_nothing_and_a_replay_that_fails_are_errors():
    backend, to = HostGraphs(), np.zeros(2, np.int64)
    with pytest.raises(ProviderFailed, match="nothing was launched") as error:
        backend.capture(lambda: None, backend.pool())
    assert error.value.rule == "P-GRAPH"
    graph = backend.capture(lambda: host.launch(add, block(to, to, 2), -1, memory=(to,)), backend.pool())
    with pytest.raises(ProviderFailed, match="failed with 1"):
        graph.replay()


def test_a_capture_that_raises_leaves_no_capture_behind():
    backend, to = HostGraphs(), np.zeros(1, np.int64)
    with pytest.raises(ZeroDivisionError):
        backend.capture(lambda: 1 // 0, backend.pool())
    host.launch(add, block(to, to, 1), 7)
    assert to.tolist() == [7]


def test_memory_of_an_array_that_is_gone_goes_to_the_next():
    pool = HostPool()
    array = pool.empty((3, 5), np.uint16)
    array[...] = 9
    address = array.ctypes.data
    pool.use_up(Fill.A5)
    assert (array == 9).all()  # it is still somebody's
    del array
    pool.use_up(Fill.A5)
    assert ctypes.string_at(address, 30) == b"\xa5" * 30
    assert pool.empty((15,), np.uint16).ctypes.data == address


def test_torch_operators_follow_what_is_written_in_place_and_nothing_else():
    q, scale = torch.arange(4.0), 2.0
    backend = HostGraphs()
    held = {}

    def work():
        held["out"] = (q * scale)[:3].relu()

    graph = backend.capture(work, backend.pool())
    out = held["out"]

    q.copy_(torch.tensor([5.0, -6.0, 7.0, 8.0]))
    scale = 3.0
    out.fill_(-1.0)
    graph.replay()
    assert out.tolist() == [10.0, 0.0, 14.0]  # the scale of the capture, the numbers of now

    q = torch.full((4,), 100.0)  # another tensor: the graph does not know it
    out.fill_(-1.0)
    graph.replay()
    assert out.tolist() == [10.0, 0.0, 14.0]


def test_an_operator_that_only_writes_does_not_run_at_capture():
    library = torch.library.Library("tracekit_test_host", "DEF")
    library.define("negate(Tensor source, Tensor(a!) to) -> ()")
    library.impl("negate", lambda source, to: to.copy_(-source) and None, "CPU")
    source, to = torch.ones(1), torch.zeros(1)
    negate = torch.ops.tracekit_test_host.negate
    graph = HostGraphs().capture(lambda: negate(source, to), HostPool())
    assert to.item() == 0
    graph.replay()
    assert to.item() == -1


@pytest.mark.parametrize(
    "read",
    [lambda x: int(x.sum()), lambda x: x.nonzero(), lambda x: torch.equal(x, x), lambda x: x[x > 1]],
    ids=["item", "nonzero", "equal", "mask"],
)
def test_a_capture_that_reads_a_result_is_refused(read):
    x, backend = torch.arange(4), HostGraphs()
    with pytest.raises(ProviderFailed, match="reads a result"):
        backend.capture(lambda: read(x), backend.pool())
    with pytest.raises(ProviderFailed, match="reads a result"), backend.sync_guard():
        read(x)
    assert read(x) is not None
