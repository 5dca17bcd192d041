"""What goes between two processes has an end: in time, in size and in kind."""

import os
import signal
import socket
import time

import pytest

from tracekit.errors import ProviderFailed
from tracekit.replayer import replay
from tracekit.replayer.channel import Channel, TooLong, Unreadable
from tracekit.replayer.messages import Named
from tracekit.replayer.worker import Worker
from tracekit.testing import MemoryTrace, dense_call
from tracekit.verdict import Status

TRACE = MemoryTrace((dense_call(lengths=(6, 4), seed=1),))


@pytest.fixture
def pair():
    one, two = socket.socketpair()
    ends = Channel(one), Channel(two)
    yield ends
    for end in ends:
        end.close()


def test_a_message_arrives(pair):
    pair[0].send({"a": 1})
    assert pair[1].receive(time.monotonic() + 60, most=1000) == {"a": 1}


def test_half_a_frame_keeps_nobody_waiting(pair):
    pair[0]._end.sendall(b"1234")
    with pytest.raises(TimeoutError):
        pair[1].receive(time.monotonic() + 0.1)


def test_a_reader_that_never_reads_keeps_nobody_waiting(pair):
    with pytest.raises(TimeoutError):
        pair[0].send(bytes(1 << 24), time.monotonic() + 0.1)


def test_a_frame_that_is_too_long_is_not_read(pair):
    pair[0]._end.sendall(b"\x7f" * 8)
    with pytest.raises(TooLong, match="at most 1,000"):
        pair[1].receive(most=1000)


def test_bytes_that_are_no_message_are_told(pair):
    pair[0]._end.sendall(b"\0\0\0\0\0\0\0\x05noise")
    with pytest.raises(Unreadable):
        pair[1].receive()


def test_the_end_of_the_other_is_told(pair):
    pair[0].close()
    with pytest.raises(EOFError):
        pair[1].receive()


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("WritesHalfALength", "did not answer within 10 seconds"),
        ("WritesAShortFrame", "did not answer within 10 seconds"),
        ("WritesAHugeLength", "sent 1,099,511,627,776 bytes where at most"),
        ("WritesNoMessage", "which is no answer (on a variant of the call)"),
    ],
)
def test_a_kernel_that_writes_to_the_channel_fails_alone(kernel, words):
    report = replay(
        [TRACE], providers=[f"tests.replayer.faulty:{kernel}"], claims=["solo", "rows"], timeout=10.0
    )

    assert report.find("solo").status is Status.INCONCLUSIVE
    assert words in report.find("solo").reason
    assert report.find("rows").status is Status.HELD


def test_a_call_that_nobody_takes_keeps_nobody_waiting():
    large = dense_call(lengths=(2000,), heads=8, kv_heads=8)
    with Worker(Named("oracle"), 1.0) as worker:
        worker.open()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(ProviderFailed, match="did not answer within 1 seconds"):
            worker.refuses(large)
        assert worker.pid is None
