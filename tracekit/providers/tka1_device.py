"""One launch of TKA-1 in the memory of a device: laid out, written, launched and read back.

Everything that a launch reads, writes or needs lies in one tensor of bytes, at addresses that stay, so the
launch can be captured: other inputs are written into the same places. Between two arrays lies a gap whose
bytes are known, and compared when they are asked for.
"""

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from tracekit.errors import ProviderFailed, Unsupported
from tracekit.model import Array
from tracekit.providers.placement import Fill
from tracekit.providers.tka1 import FamilyInput, Inputs, Lists, Outputs, Partials
from tracekit.providers.tka1.abi import THREADS, GpuArgs, answer, blocks, gpu_arguments, workspace
from tracekit.providers.tka1.driver import Grid

_ALIGN = 256
_GUARD = 4096
"""Bytes of a gap where canaries are asked for, as on the host (`guarded.GUARD`)."""


class Launcher(Protocol):
    """What launches an entry of the kernels: loaded code on a device, or what stands in for one in a test."""

    def launch(self, kernel: str, grid: Grid, threads: int, block: ctypes.Structure, stream: int) -> None:
        """Launch; see `driver.Code.launch`."""
        ...


@dataclass(frozen=True)
class _Slot:
    """A place in the arena: where it starts, and bytes that it has room for."""

    start: int
    room: int


class DeviceLaunch:
    """A launch with room for several calls of the same rows, heads, families, dtype and scale.

    Args:
        launcher: of the kernels in the dtype of the calls.
        launches: what it must have room for.
        device: as torch names it.
        partials: whether the rows before S10 are wanted too.
        fill: what gaps, unused room and outputs hold; given, gaps are 4 KiB and `check` compares them.

    Raises:
        Unsupported: `P-GRAPH`, the calls cannot share a launch; `K-VALUE-DIM`, `K-GRID`.
    """

    def __init__(
        self,
        launcher: Launcher,
        launches: Sequence[Inputs],
        device: str | torch.device,
        *,
        partials: bool = False,
        fill: Fill | None = None,
    ) -> None:
        if len({_by_value(inputs) for inputs in launches}) != 1:
            raise Unsupported(
                "a captured launch keeps its rows, heads, families, dtype and scale; these calls differ.",
                rule="P-GRAPH",
            )
        self._requests = max(len(inputs.families[0].keys) for inputs in launches)
        one = launches[0]
        self.launcher, self.dtype, self.fill = launcher, one.dtype, fill or Fill.NANS
        self._gap = _GUARD if fill else _ALIGN
        self.cut = blocks(*launches)
        self.out, self.partials, results = answer(one)
        self._results = results if partials else {k: v for k, v in results.items() if k not in "acc l m"}
        self._room = workspace(one, self.cut)
        self.block: GpuArgs | None = None
        self._written: Array = np.zeros(0, np.uint8)
        self._slots, self._inputs_end = self._plan([self._padded(inputs) for inputs in launches])
        size = max(slot.start + slot.room for slot in self._slots) + self._gap
        self.arena = torch.empty(size + _ALIGN, dtype=torch.uint8, device=device)
        self.arena = self.arena[-self.arena.data_ptr() % _ALIGN :][:size]
        self.poison(self.fill)

    def load(self, inputs: Inputs) -> None:
        """Write the inputs of a launch into their places.

        Raises:
            Unsupported: `P-GRAPH`, the launch needs more room, or other arguments than those before.
        """
        mirror = self._pattern(self._inputs_end)
        base, numbers = self.arena.data_ptr(), _Numbers()

        def place(array: Array) -> int:
            slot = self._slots[numbers.of(array)]
            if array.nbytes > slot.room:
                raise Unsupported("a call needs more room than its captured launch has.", rule="P-GRAPH")
            if slot.start < self._inputs_end:
                mirror[slot.start : slot.start + array.nbytes] = _bytes(array)
            return base + slot.start

        block = gpu_arguments(self._padded(inputs), self.cut, place, self._results, self._room)
        if self.block is not None and bytes(block) != bytes(self.block):
            raise Unsupported("a call needs other arguments than its captured launch has.", rule="P-GRAPH")
        self.block, self._written = block, mirror
        self.arena[: self._inputs_end].copy_(torch.from_numpy(mirror))

    def enqueue(self) -> None:
        """Launch both kernels on torch's current stream of the device; nothing here waits or allocates.

        The driver launches on the device that is current in this thread, whichever memory the arguments name,
        so the device of the memory is made current.
        """
        assert self.block is not None, "nothing is loaded"
        device = self.arena.device
        cuda = device.type == "cuda"
        with torch.cuda.device(device) if cuda else nullcontext():
            stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0
            for name, grid in self.cut.kernels:
                self.launcher.launch(name, grid, THREADS, self.block, stream)

    def poison(self, fill: Fill) -> None:
        """Fill the outputs, the workspace and the gaps between them."""
        self.fill = fill
        rest = self._pattern(self.arena.numel() - self._inputs_end)
        self.arena[self._inputs_end :].copy_(torch.from_numpy(rest))

    def read(self) -> tuple[Outputs, Partials]:
        """Return copies of the answers; partials are zero where they were not asked for."""
        for array in self._results.values():
            slot = self._slots[self._number[id(array)]]
            words = self.arena[slot.start : slot.start + array.nbytes].cpu().numpy()
            array[...] = words.view(array.dtype).reshape(array.shape)
        copies = ([array.copy() for array in vars(one).values()] for one in (self.out, self.partials))
        out, part = copies
        return Outputs(*out), Partials(*part)

    def changed(self) -> str | None:
        """Return what of the inputs, or beside them, is not as it was loaded, or None."""
        now = self.arena[: self._inputs_end].cpu().numpy()
        return None if np.array_equal(now, self._written) else "an input, or memory beside one"

    def check(self) -> None:
        """Refuse a launch that wrote into an input or beside an output.

        Raises:
            ProviderFailed: `P-CANARY`.
        """
        what = self.changed()
        rest, want = (
            self.arena[self._inputs_end :].cpu().numpy(),
            self._pattern(len(self.arena) - self._inputs_end),
        )
        for slot in self._slots:
            if slot.start >= self._inputs_end:
                start = slot.start - self._inputs_end
                rest[start : start + slot.room] = want[start : start + slot.room]
        if what or not np.array_equal(rest, want):
            raise ProviderFailed(
                f"the kernel wrote into {what or 'memory beside an output'}; it may write into its outputs "
                "alone.",
                rule="P-CANARY",
            )

    def _plan(self, launches: Sequence[Inputs]) -> tuple[list[_Slot], int]:
        """Give each array a place with room for its size in any of the launches: inputs first."""
        sizes: list[list[int]] = []
        own: set[int] = set()
        for inputs in launches:
            numbers = _Numbers()
            gpu_arguments(inputs, self.cut, numbers.of, self._results, self._room)
            self._number = {id(array): number for number, array in enumerate(numbers.arrays)}
            own = {self._number[id(array)] for array in (*self._results.values(), *self._room)}
            sizes.append([array.nbytes for array in numbers.arrays])
        if len({len(one) for one in sizes}) != 1:
            raise Unsupported("the calls share other arrays; they cannot share a launch.", rule="P-GRAPH")
        rooms = [-(-max(one) // _ALIGN) * _ALIGN for one in zip(*sizes, strict=True)]
        starts, at, inputs_end = [0] * len(rooms), self._gap, 0
        for outputs in (False, True):
            for number, room in enumerate(rooms):
                if (number in own) is outputs:
                    starts[number] = at
                    at += room + self._gap
            inputs_end = inputs_end or at
        return [_Slot(*pair) for pair in zip(starts, rooms, strict=True)], inputs_end

    def _padded(self, inputs: Inputs) -> Inputs:
        """The launch with as many requests as the one with most; those that are added hold no row.

        Every array is one of its own, for one that is met twice has one place: only the keys of a request may
        be its values.
        """
        more = self._requests - len(inputs.families[0].keys)

        def family(one: FamilyInput) -> FamilyInput:
            pairs = [*zip(one.keys, one.values, strict=True)]
            keys, values = [], []
            for k, v in pairs + [_none(k, shared=v is k, like=v) for k, v in pairs[:1] * more]:
                keys.append(k[:])
                values.append(keys[-1] if v is k else v[:])
            return replace(one, keys=tuple(keys), values=tuple(values), first=one.first + (0,) * more)

        return replace(inputs, families=tuple(map(family, inputs.families)))

    def _pattern(self, size: int) -> Array:
        wide = self.dtype.container
        words = np.full(-(-size // wide.itemsize), self.fill.pattern(self.dtype), wide)
        return words.view(np.uint8)[:size]


class _Numbers:
    """Numbers arrays in the order in which they are first met."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []  # kept, so that no other array gets the id of one
        self._known: dict[int, int] = {}

    def of(self, array: Array) -> int:
        if id(array) not in self._known:
            self._known[id(array)] = len(self.arrays)
            self.arrays.append(array)
        return self._known[id(array)]


def _none(k: Array, *, shared: bool, like: Array) -> tuple[Array, Array]:
    """Keys and values of a request that holds no row."""
    keys = k[:0]
    return keys, keys if shared else like[:0]


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _by_value(inputs: Inputs) -> tuple[Any, ...]:
    families = tuple(isinstance(one.selection, Lists) for one in inputs.families)
    shape = (inputs.q.shape, inputs.kv_heads, inputs.value_dim, inputs.sink is None)
    return (*shape, families, inputs.dtype, inputs.scale_bits)
