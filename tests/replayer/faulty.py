"""Kernels that misbehave; made in child processes by `tests.replayer.faulty:NAME`."""

import os
import signal
import stat
import struct
import threading
from dataclasses import replace

import numpy as np

from tracekit.controls.backward import SumsInArrival
from tracekit.controls.schedule import CutWhereScheduled
from tracekit.controls.solo import SmallBatchKernel
from tracekit.errors import ProviderFailed, Unavailable, Unsupported, UsageError
from tracekit.model import AttentionCall, Bits, DType, ExecutedIdentity, KVRows
from tracekit.providers.base import Answer, Launch, Tensors
from tracekit.providers.oracle import Oracle
from tracekit.providers.portable import Tka1


class Faulty(Oracle):
    """Right, until a launch has one row."""

    id = "faulty"

    def advertised(self):
        return frozenset({"rerun", "solo", "rows"})

    def run(self, launch: Launch) -> Answer:
        if any(call.num_rows == 1 for call in launch.calls):
            self.fail(launch.calls[0])
        return super().run(launch)

    def fail(self, call: AttentionCall) -> None:
        raise NotImplementedError


class Raises(Faulty):
    def fail(self, call):
        raise IndexError("list index\nout of range")


class Leaves(Faulty):
    def fail(self, call):
        raise SystemExit(0)


class Exits(Faulty):
    def fail(self, call):
        os._exit(7)


class Crashes(Faulty):
    def fail(self, call):
        os.kill(os.getpid(), signal.SIGSEGV)


class Hangs(Faulty):
    def fail(self, call):
        threading.Event().wait()


class Narrow(Tka1):
    """Right, and refuses what is not bf16."""

    id = "narrow"

    def capabilities(self):
        return replace(super().capabilities(), dtypes=frozenset({DType.BFLOAT16}))


class Talks(Faulty):
    """Prints to both streams: the answers must not be disturbed."""

    def fail(self, call):
        os.write(1, b"noise on stdout\n")
        os.write(2, b"noise on stderr\n")


class OneAnswerShort(Faulty):
    def run(self, launch):
        answer = Oracle.run(self, launch)
        short = answer.tensors[1:] if len(launch.calls) > 1 else answer.tensors
        return Answer(short, answer.executed)


class OneRowShort(Faulty):
    def run(self, launch):
        answer = Oracle.run(self, launch)
        if launch.calls[0].num_rows > 1:
            return answer
        tensors = tuple(Tensors(Bits(t.out.data[:0], t.out.dtype), None) for t in answer.tensors)
        return Answer(tensors, answer.executed)


class LosesLse(Oracle):
    """Forgets the LSE of a launch of one row."""

    id = "loses-lse"

    def run(self, launch):
        answer = super().run(launch)
        tensors = tuple(Tensors(t.out, t.lse if len(t.out.data) > 1 else None) for t in answer.tensors)
        return Answer(tensors, answer.executed)


class TellsNoSchedule(Tka1):
    """Runs in schedules, as far as anybody knows."""

    def run(self, launch):
        return replace(super().run(launch), schedule=None)


class IgnoresSchedules(Tka1):
    """Takes schedules, and runs as always."""

    def run(self, launch):
        usual = replace(launch, execution=replace(launch.execution, schedule=None, threads=1))
        return super().run(usual)


class ReadsHalf(CutWhereScheduled):
    """The twin of `schedule`, as a kernel."""


class FailsOnBaseline(Faulty):
    def run(self, launch):
        os._exit(9)


class NeedsPlan(Oracle):
    def capabilities(self):
        return replace(super().capabilities(), launch_plan=True)


class PlanDecides(Oracle):
    """Rounds otherwise on a recorded launch."""

    id = "plan-decides"

    def run(self, launch):
        answer = super().run(launch)
        odd = [int(call.launch is not None) for call in launch.calls]
        tensors = tuple(
            Tensors(Bits(t.out.data | t.out.data.dtype.type(one), t.out.dtype), t.lse)
            for one, t in zip(odd, answer.tensors, strict=True)
        )
        return Answer(tensors, answer.executed)


class CannotBeMade(Oracle):
    def __init__(self):
        raise OSError("libkernel.so: cannot open shared object file")


class NotInstalled(Oracle):
    def __init__(self):
        raise Unavailable("this kernel needs a GPU.", rule="X-GPU")


def spoiled():
    """A kernel that promises `solo` and breaks it."""
    kernel = SmallBatchKernel()
    kernel.advertised = lambda: frozenset({"rerun", "solo"})
    return kernel


def no_provider():
    return object()


class SaysItIsMisnamed(Faulty):
    def fail(self, call):
        raise UsageError("no such tile.", rule="K-TILE")


class SaysItIsMissing(Faulty):
    def fail(self, call):
        raise Unavailable("the device went away.", rule="K-GONE")


class _Lost(ProviderFailed):
    def __init__(self, code):
        super().__init__(f"lost with code {code}.", rule="K-LOST", code=code, at=object())


class RaisesItsOwn(Faulty):
    def fail(self, call):
        raise _Lost(5)


class TalksForEver(Faulty):
    def fail(self, call):
        raise ValueError("x" * 100_000)


class RefusesByRaising(Faulty):
    def refuses(self, call):
        raise Unsupported("not this shape", rule="K-SHAPE")


class RefusesWithTrue(Faulty):
    def refuses(self, call):
        return True


class RefusesWithList(Faulty):
    def refuses(self, call):
        return ["too large"]


class NumberedId(Oracle):
    id = 7


class AdvertisesNothing(Oracle):
    def advertised(self):
        return None


class OwnCapabilities(Oracle):
    def capabilities(self):
        return {"lse": True}


class OddVersion(Faulty):
    def run(self, launch):
        answer = Oracle.run(self, launch)
        return Answer(answer.tensors, ExecutedIdentity("odd", {"cuda": (12, 4)}))


class _Text(str):
    pass


class OwnText(Faulty):
    """Right, with texts of a class that only the child knows."""

    def run(self, launch):
        answer = Oracle.run(self, launch)
        return Answer(answer.tensors, ExecutedIdentity(_Text("odd"), {_Text("cuda"): _Text("12.4")}))


class HangsInTheOpen(Faulty):
    """Keeps open the pipe that `PIPE_OF_THE_TEST` names, in itself and in a process that it starts."""

    def fail(self, call):
        pipe = os.open(os.environ["PIPE_OF_THE_TEST"], os.O_WRONLY)
        if not os.fork():
            signal.pause()
            os._exit(0)
        os.write(pipe, b"hangs")
        signal.pause()


class HangsAlone(Faulty):
    """As above, in itself only."""

    def fail(self, call):
        os.write(os.open(os.environ["PIPE_OF_THE_TEST"], os.O_WRONLY), b"hangs")
        signal.pause()


class _Writes(Faulty):
    """Writes to the socket of its process, as a kernel may that closes and opens descriptors."""

    words: bytes = b""

    def fail(self, call):
        for number in range(3, 64):
            try:
                is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
            except OSError:
                continue
            if is_socket:
                os.write(number, self.words)
        self.go_on()

    def go_on(self):
        threading.Event().wait()


class WritesHalfALength(_Writes):
    words = b"1234"


class WritesAShortFrame(_Writes):
    words = struct.pack(">Q", 1000) + b"half"


class WritesAHugeLength(_Writes):
    words = struct.pack(">Q", 1 << 40)


class WritesNoMessage(_Writes):
    words = struct.pack(">Q", 4) + b"noise"


class _Training(Tka1):
    """TKA-1, whose gradients a subclass spoils."""

    def run(self, launch: Launch) -> Answer:
        answer = super().run(launch)
        return Answer(tuple(self.spoil(one) for one in answer.tensors), answer.executed)

    def spoil(self, tensors: Tensors) -> Tensors:
        raise NotImplementedError


class NoGradients(_Training):
    def spoil(self, tensors):
        return replace(tensors, grads=None)


class NoQueryGradient(_Training):
    def spoil(self, tensors):
        return replace(tensors, grads=tensors.grads and replace(tensors.grads, d_q=None))


class NoKeyGradients(_Training):
    def spoil(self, tensors):
        return replace(tensors, grads=tensors.grads and replace(tensors.grads, d_kv={}))


class NoSinkGradient(_Training):
    def spoil(self, tensors):
        return replace(tensors, grads=tensors.grads and replace(tensors.grads, d_sink=None))


class ShortGradient(_Training):
    def spoil(self, tensors):
        grads = tensors.grads
        return replace(tensors, grads=grads and replace(grads, d_q=grads.d_q.part(slice(1, None))))


WORDS_OF_GRADIENTS = (
    ("NoGradients", "not every gradient"),
    ("NoQueryGradient", "not every gradient"),
    ("NoSinkGradient", "not every gradient"),
    ("NoKeyGradients", "not the gradient of all KV"),
    ("ShortGradient", "gradients that do not fit"),
)


class ArrivalOrder(SumsInArrival):
    """The twin of `backward` under a name of its own."""


class NanGradient(_Training):
    def spoil(self, tensors):
        grads = tensors.grads
        return replace(tensors, grads=grads and replace(grads, d_q=_filled(grads.d_q, np.nan)))


class ZeroKeyGradients(_Training):
    """A backward that ended before it wrote its gradients of keys and values."""

    def spoil(self, tensors):
        grads = tensors.grads
        given = {} if grads is None else grads.d_kv
        d_kv = {
            key: {family: _emptied(rows) for family, rows in families.items()}
            for key, families in given.items()
        }
        return replace(tensors, grads=grads and replace(grads, d_kv=d_kv))


def _emptied(rows: KVRows) -> KVRows:
    return replace(rows, keys=_filled(rows.keys, 0), values=rows.values and _filled(rows.values, 0))


def _filled(bits: Bits, value: float) -> Bits:
    return Bits.from_float32(np.full(bits.shape, value, np.float32), bits.dtype)


class _Hollow(Tka1):
    """TKA-1, whose answer a subclass makes worthless in the same way in every launch."""

    def run(self, launch):
        answer = super().run(launch)
        return replace(answer, tensors=tuple(map(self.spoiled, answer.tensors)))

    def spoiled(self, tensors):
        return replace(tensors, out=self.spoil(tensors.out))


class GivesNan(_Hollow):
    def spoil(self, out):
        return Bits(np.full_like(out.data, 0x7FC1), out.dtype)


class GivesOneInfinity(_Hollow):
    def spoil(self, out):
        data = out.data.copy()
        data[:, 0, 0] = 0x7F80
        return Bits(data, out.dtype)


class GivesNanLse(_Hollow):
    def spoiled(self, tensors):
        return replace(tensors, lse=Bits(np.full_like(tensors.lse.data, 0x7FC00000), tensors.lse.dtype))


class WritesNothing(_Hollow):
    """A launch that failed without a word leaves its output as it was."""

    def spoil(self, out):
        return Bits(np.zeros_like(out.data), out.dtype)
