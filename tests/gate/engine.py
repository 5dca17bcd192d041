"""A small engine: two layers with fixed numbers, and a kernel in a process that can be killed."""

import multiprocessing
import os
import signal

import numpy as np

from tracekit.errors import ProviderFailed
from tracekit.gate import Slots
from tracekit.model import (
    AttentionCall,
    Bits,
    Conventions,
    DType,
    ExecutedIdentity,
    KVFamily,
    KVRows,
    Lists,
    Mode,
    Provenance,
    Ranges,
    RequestKey,
    Rows,
    Selection,
    scale_to_bits,
)
from tracekit.model.events import Pages
from tracekit.providers.base import Answer, Tensors
from tracekit.providers.portable import Tka1

LENGTH, HEADS, DIM, WINDOW, PAGE = 64, 2, 16, 8, 4
KEYS = {name: RequestKey.of_prompt([number], 0) for number, name in enumerate("abcd")}


def numbers(seed, *shape):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return Bits.from_float32(values, DType.BFLOAT16)


class Engine:
    """Calls of layer 0 (dense) and layer 1 (window and C4 rows, keys are values)."""

    def __init__(self):
        self.q, self.dense, self.recent, self.c4 = {}, {}, {}, {}
        for number, name in enumerate(KEYS):
            self.q[name] = [numbers(100 + 10 * number + layer, LENGTH, HEADS, DIM) for layer in range(2)]
            self.dense[name] = [numbers(200 + 10 * number + part, LENGTH, 1, DIM) for part in range(2)]
            self.recent[name] = numbers(300 + number, LENGTH, 1, DIM)
            self.c4[name] = numbers(400 + number, LENGTH // 4, 1, DIM)

    def call(self, layer, spans, mode=Mode.PREFILL, *, generation=0, order=None, wrong=None):
        """The rows `first .. end - 1` of some requests; `wrong` names a tensor to change a bit of."""
        names = [name for name, _, _ in spans]
        positions = np.concatenate([np.arange(first, end) for _, first, end in spans])
        request = np.repeat(np.arange(len(spans), dtype=np.int32), [end - first for _, first, end in spans])
        q = np.concatenate([self.q[name][layer].data[first:end] for name, first, end in spans])
        kv, families = {}, {}
        for name, first, end in spans:
            if layer == 0:
                keys, values = (part.part(slice(0, end)) for part in self.dense[name])
                if wrong == "keys":
                    keys = flipped(keys, first)
                kv[KEYS[name]] = {KVFamily.DENSE: KVRows(keys, values, 0, generation)}
            else:
                oldest = max(0, first - WINDOW + 1)
                kv[KEYS[name]] = {
                    KVFamily.RECENT: KVRows(
                        self.recent[name].part(slice(oldest, end)), None, oldest, generation
                    ),
                    KVFamily.C4: KVRows(self.c4[name].part(slice(0, end // 4)), None, 0, generation),
                }
        if layer == 0:
            families[KVFamily.DENSE] = Ranges(np.zeros_like(positions), positions + 1)
        else:
            families[KVFamily.RECENT] = Ranges(np.maximum(positions - WINDOW + 1, 0), positions + 1)
            families[KVFamily.C4] = Lists.of([np.arange((p + 1) // 4)[::-1] for p in positions.tolist()])
        bits = Bits(q, DType.BFLOAT16)
        call = AttentionCall(
            layer=layer,
            step=0,
            mode=mode,
            rows=Rows(tuple(KEYS[name] for name in names), request, positions, np.full(positions.shape, -1)),
            q=flipped(bits, 0) if wrong == "q" else bits,
            kv=kv,
            sink=None,
            selection=Selection(families),
            conventions=Conventions(scale_to_bits(DIM**-0.5), window=WINDOW if layer else None),
            provenance=Provenance("engine", "tka1", ExecutedIdentity("tka1")),
        )
        return call if order is None else call.take(np.asarray(order(call.num_rows)))


def flipped(bits, row):
    """The last bit of the first element of a row, turned over."""
    data = bits.data.copy()
    data[row].flat[0] ^= 1
    return Bits(data, bits.dtype)


def pages(call, tables):
    """Each family of each request on pages of its own."""
    found = {}
    for key, families in call.kv.items():
        for family in families:
            found[key, family] = Slots(pages=Pages(PAGE, tuple(tables[key])))
    return found


class KernelProcess:
    """TKA-1 in a process of its own, which a launch may lose. `fault` is what the next launch does.

    `raises`, `nan`, `flag` (a finite flag that is false), `dies` (the process kills itself in the launch),
    `killed` (it is killed while it computes).
    """

    id = "tka1-process"

    def __init__(self):
        self.fault, self.launches = "", 0
        self._child = self._pipe = None

    def capabilities(self):
        return Tka1().capabilities()

    def advertised(self):
        return frozenset()

    def identity(self):
        return Tka1().identity()

    def refuses(self, call):
        return None

    def run(self, launch):
        if self._child is None or not self._child.is_alive():
            self._start()
        fault, self.fault = self.fault, ""
        self.flag = fault != "flag"
        self.launches += 1
        self._pipe.send((launch, fault))
        if fault == "killed":
            os.kill(self._child.pid, signal.SIGKILL)
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._child.join()
            code = self._child.exitcode
            raise ProviderFailed(f"the kernel's process ended with {code}.", rule="died", code=code) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def flags(self):
        return [True, self.flag]

    def _start(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.gate.engine"])
        self._pipe, other = context.Pipe()
        self._child = context.Process(target=serve, args=(other,), daemon=True)
        self._child.start()
        other.close()

    def close(self):
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._pipe.close()


def serve(pipe):
    while True:
        try:
            launch, fault = pipe.recv()
        except EOFError:
            return
        if fault == "killed":
            signal.pause()
        answer = Tka1().run(launch)
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raises":
            answer = ArithmeticError("an illegal memory access was encountered")
        if fault == "nan":
            (tensors,) = answer.tensors
            data = tensors.out.data.copy()
            data.flat[0] = 0x7FC0
            answer = Answer((Tensors(Bits(data, DType.BFLOAT16), tensors.lse),), answer.executed)
        pipe.send(answer)
