"""An interpreter of PTX for whole kernels: what nvcc makes of kernels/tk_gpu.cu, run without a GPU.

All threads of a grid run side by side as numpy arrays, each with its own program counter; the instruction at
the smallest counter is done next, by the threads that stand there, so loops and divergence need no analysis.
What is not known is an error, and so is every approximate, contracted or flushing float operation: the names
of those are not in the tables below. Semantics: NVIDIA, "Parallel Thread Execution ISA".
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.providers.tka1 import arithmetic as ar

Array = npt.NDArray[Any]
Threads = npt.NDArray[np.intp]

_TYPES = {
    **{
        f"{k}{n}": np.dtype(f"{c}{n // 8}")
        for k, c in (("u", "u"), ("b", "u"), ("s", "i"))
        for n in (16, 32, 64)
    },
    "b8": np.dtype("u1"),
    "u8": np.dtype("u1"),
    "f32": np.dtype(np.float32),
    "pred": np.dtype(bool),
}
_BASE = 1 << 40
"""Address of the first byte of global memory; far from every shared and local address."""


class Memory:
    """Global memory: arrays at addresses, read back when the kernels are done."""

    def __init__(self, base: int = _BASE) -> None:
        self.base = base
        self._arrays: list[tuple[int, Array]] = []
        self._size = 0
        self.bytes: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def place(self, array: Array) -> int:
        """Return the address of an array; the same one for the same array."""
        for address, known in self._arrays:
            if known is array:
                return address
        address = self.base + self._size
        self._arrays.append((address, array))
        self._size += (array.nbytes + 127) // 64 * 64  # a gap after each array
        return address

    def load(self) -> None:
        """Copy the arrays in; gaps hold a pattern that no kernel may depend on."""
        self.bytes = np.full(self._size, 0xCD, np.uint8)
        for address, array in self._arrays:
            start = address - self.base
            self.bytes[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()

    def store(self) -> None:
        """Copy the arrays out again."""
        for address, array in self._arrays:
            start = address - self.base
            if array.flags.writeable:
                array[...] = self.bytes[start : start + array.nbytes].view(array.dtype).reshape(array.shape)


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@guard name operands`."""

    guard: str
    negated: bool
    name: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """One entry of a PTX text."""

    name: str
    code: list[Instruction]
    labels: dict[str, int]
    registers: dict[str, np.dtype[Any]]
    shared: dict[str, int]
    local: dict[str, int]


def parse(text: str, name: str) -> Kernel:
    """Return the entry `name`; `ValueError` where there is none."""
    found = re.search(rf"\.entry {name}\(.*?\)[^{{]*\{{(.*?)\n\}}", text, re.DOTALL)
    if found is None:
        raise ValueError(f"no entry {name} in the PTX")
    body = re.sub(r"//[^\n]*", "", found[1])
    kernel = Kernel(name, [], {}, {}, {}, {})
    for match in re.finditer(r"\.reg \.(\w+)\s+(%\w+)<(\d+)>", body):
        kernel.registers.update({f"{match[2]}{i}": _TYPES[match[1]] for i in range(int(match[3]))})
    for match in re.finditer(r"\.reg \.(\w+)\s+(%\w+);", body):
        kernel.registers[match[2]] = _TYPES[match[1]]
    for space, at in (("shared", kernel.shared), ("local", kernel.local)):
        end = 0
        for match in re.finditer(rf"\.{space} \.align (\d+) \.b8\s+(\w+)\[(\d+)\]", body):
            at[match[2]] = end
            end += (int(match[3]) + 15) // 16 * 16
        at[""] = end  # the size of all
    for line in re.split(r";|(?<=:)", body):
        statement = line.strip()
        if statement.endswith(":"):
            kernel.labels[statement[:-1]] = len(kernel.code)
        elif statement and not statement.startswith((".", "}", "{")):
            kernel.code.append(_instruction(statement))
    return kernel


def _instruction(statement: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%p\d+)\s+)?([\w.]+)\s*(.*)", statement, re.DOTALL)
    if found is None:
        raise NotImplementedError(statement)
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", found[4])
    return Instruction(found[2] or "", found[1] == "!", found[3], tuple(operands))


# ---- what an instruction computes, from operands of its type


def _divide(x: Array, y: Array) -> Array:
    wide, by = x.astype(np.int64), np.where(y == 0, 1, y).astype(np.int64)
    return np.asarray((np.abs(wide) // np.abs(by) * np.sign(wide) * np.sign(by)).astype(x.dtype))


def _shift(x: Array, by: Array, left: bool) -> Array:
    bits = 8 * x.dtype.itemsize
    some = np.minimum(by.astype(np.uint64), bits - 1).astype(x.dtype)
    far = by.astype(np.uint64) >= bits
    if left:
        return np.asarray(np.where(far, x.dtype.type(0), x << some))
    return np.asarray(np.where(far & (x >= 0), x.dtype.type(0), x >> some))


def _leading_zeros(x: Array) -> Array:
    return np.asarray(32 - np.frexp(x.astype(np.float64))[1], np.uint32)


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": lambda x, y: (x != y) & (x == x) & (y == y),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
    "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
    "neu": np.not_equal,
    "equ": lambda x, y: ~((x < y) | (x > y)),
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
}
_FLOAT: dict[str, Callable[..., Array]] = {
    "fma.rn.f32": ar.fma,
    "add.rn.f32": np.add,
    "sub.rn.f32": np.subtract,
    "mul.rn.f32": np.multiply,
    "neg.f32": np.negative,
    "abs.f32": np.abs,
}
_INTEGER: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "mad.lo": lambda a, b, c: a * b + c,
    "div": _divide,
    "rem": lambda x, y: x - _divide(x, y) * y,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": lambda x: np.zeros_like(x) - x,
    "mov": lambda x: x,
    "cvta.to.global": lambda x: x,
    "cvta.to.local": lambda x: x,
    "cvta.to.shared": lambda x: x,
}


@dataclass
class _Grid:
    """A launch under way: registers and memories of all threads."""

    kernel: Kernel
    grid: tuple[int, int, int]
    threads: int
    parameters: npt.NDArray[np.uint8]
    memory: Memory
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks = int(np.prod(self.grid))
        self.size = blocks * self.threads
        index = np.arange(self.size)
        self.block = index // self.threads
        x, y, _ = self.grid
        special = {
            "%tid.x": index % self.threads,
            "%ctaid.x": self.block % x,
            "%ctaid.y": self.block // x % y,
            "%ctaid.z": self.block // (x * y),
        }
        self.special = {name: value.astype(np.uint32) for name, value in special.items()}
        self.registers = {name: np.zeros(self.size, t) for name, t in self.kernel.registers.items()}
        self.shared = np.full((blocks, self.kernel.shared[""] + 16), 0xCD, np.uint8)
        self.local = np.full((self.size, self.kernel.local[""] + 16), 0xCD, np.uint8)

    def read(self, operand: str, kind: str, on: Threads) -> Array:
        """The value of an operand for some threads."""
        wanted = _TYPES[kind]
        if operand in self.registers:
            value = self.registers[operand][on]
        elif operand in self.special:
            value = self.special[operand][on]
        elif operand.startswith("0f"):
            value = np.full(on.size, int(operand[2:], 16), np.uint32)
        elif operand in self.kernel.shared or operand in self.kernel.local:
            value = np.full(on.size, {**self.kernel.shared, **self.kernel.local}[operand], np.uint64)
        elif operand.startswith(self.kernel.name):
            value = np.zeros(on.size, np.uint64)  # the address of the parameters
        else:
            bits = int(operand, 0) & ((1 << 8 * wanted.itemsize) - 1)
            value = np.full(on.size, bits, f"u{wanted.itemsize}")
        if value.dtype.itemsize == wanted.itemsize:
            return value.view(wanted)
        return value.astype(wanted)

    def write(self, register: str, value: Array, on: Threads) -> None:
        target = self.registers[register]
        if target.dtype.itemsize == value.dtype.itemsize:
            target[on] = np.ascontiguousarray(value).view(target.dtype)
        else:  # a load into a wider register extends by the type of the value
            signed = value.dtype.kind == "i"
            target[on] = value.astype(np.int64 if signed else value.dtype).astype(target.dtype)

    def run(self) -> None:
        """Run to the end; a barrier opens when every thread of its block waits or has ended."""
        end = len(self.kernel.code)
        counter, waits = np.zeros(self.size, np.int64), np.zeros(self.size, bool)
        with np.errstate(all="ignore"):
            while True:
                running = np.where(waits, end, counter)
                here = int(running.min())
                if here == end:
                    if not waits.any():
                        return
                    done = (waits | (counter == end)).reshape(-1, self.threads).all(1)
                    opened = waits & done.repeat(self.threads)
                    if not opened.any():
                        raise RuntimeError(f"{self.kernel.name}: a barrier that not all threads reach")
                    counter[opened] += 1
                    waits[opened] = False
                    continue
                on = np.flatnonzero(running == here)
                self._one(self.kernel.code[here], on, counter, waits, here, end)

    def _one(
        self, at: Instruction, on: Threads, counter: Array, waits: npt.NDArray[np.bool_], here: int, end: int
    ) -> None:
        self.counts[at.name] = self.counts.get(at.name, 0) + on.size
        if at.name == "bar.sync":
            waits[on] = True
            return
        counter[on] = here + 1
        if at.guard:
            on = on[self.registers[at.guard][on] ^ at.negated]
        if at.name in ("bra", "bra.uni"):
            counter[on] = self.kernel.labels[at.operands[0]]
        elif at.name == "ret":
            counter[on] = end
        elif at.name.startswith(("ld.", "st.")):
            self._move(at, on)
        else:
            self.write(at.operands[0], self._value(at, on), on)

    def _value(self, at: Instruction, on: Threads) -> Array:
        name, kind = at.name.rsplit(".", 1)
        operands = at.operands[1:]
        if at.name in _FLOAT:
            return np.asarray(_FLOAT[at.name](*(self.read(x, "f32", on) for x in operands)), np.float32)
        if name.startswith("setp."):
            x, y = (self.read(o, kind, on) for o in operands)
            return _COMPARE[name.removeprefix("setp.")](x, y)
        if name == "selp":
            a, b = (self.read(x, kind, on) for x in operands[:2])
            return np.where(self.registers[operands[2]][on], a, b)
        if name in ("shl", "shr"):
            return _shift(self.read(operands[0], kind, on), self.read(operands[1], "u32", on), name == "shl")
        if name == "mul.wide":
            wide = "s64" if kind == "s32" else "u64"
            x, y = (self.read(o, kind, on).astype(_TYPES[wide]) for o in operands)
            return np.asarray(x * y)
        if at.name == "clz.b32":
            return _leading_zeros(self.read(operands[0], kind, on))
        if name == "cvt.rn.f32" and kind != "f32":  # of an integer
            return self.read(operands[0], kind, on).astype(np.float32)
        if name.startswith("cvt.") and kind in _TYPES and name[4:] in _TYPES and "f" not in at.name[4:]:
            return self.read(operands[0], kind, on).astype(_TYPES[name[4:]])
        if name in _INTEGER and (kind != "f32" or name == "mov"):
            return np.asarray(_INTEGER[name](*(self.read(x, kind, on) for x in operands)))
        raise NotImplementedError(f"{at.name} {', '.join(at.operands)}")

    def _move(self, at: Instruction, on: Threads) -> None:
        parts = at.name.split(".")
        store, kind = parts[0] == "st", parts[-1]
        spaces = ("param", "shared", "local", "global")
        space = next((p for p in parts[1:] if p in spaces), "global")  # the kernels take no other address
        where, what = at.operands if store else at.operands[::-1]
        base, _, offset = where.strip("[] ").partition("+")
        address = self.read(base, "u64", on).astype(np.int64) + int(offset or 0)
        size = _TYPES[kind].itemsize
        for i, register in enumerate(x.strip() for x in what.strip("{}").split(",")):
            cells = address[:, None] + (np.arange(size) + i * size)
            memory, index = self._cells(space, cells, on)
            if store:
                value = np.ascontiguousarray(self.read(register, kind, on))
                memory[index] = value.view(np.uint8).reshape(on.size, size)
            else:
                self.write(register, np.ascontiguousarray(memory[index]).view(_TYPES[kind])[:, 0], on)

    def _cells(self, space: str, cells: Array, on: Threads) -> tuple[npt.NDArray[np.uint8], Any]:
        if space == "param":
            return self.parameters, (cells,)
        if space == "shared":
            return self.shared, (self.block[on][:, None], cells)
        if space == "local":
            return self.local, (on[:, None], cells)
        if cells.size and (
            cells.min() < self.memory.base or cells.max() >= self.memory.base + self.memory.bytes.size
        ):
            raise IndexError(f"{self.kernel.name}: an access outside of global memory")
        return self.memory.bytes, (cells - self.memory.base,)


def launch(
    kernel: Kernel, grid: tuple[int, int, int], threads: int, parameters: bytes, memory: Memory
) -> dict[str, int]:
    """Run a kernel over a grid; return how many times each instruction was done, by name.

    Raises:
        NotImplementedError: an instruction that is not known here.
        IndexError: an access outside of global memory.
        RuntimeError: a barrier that only some threads of a block reach.
    """
    run = _Grid(kernel, grid, threads, np.frombuffer(parameters, np.uint8), memory)
    if run.size:
        run.run()
    return run.counts
