"""The KV row log: each row of one request, layer and family is held once, however often it is read.

A decode of 512 steps reads the same rows 512 times. On each call the rows that the kernel consumed are
compared, byte by byte, with those already held: equal rows become a view of the log. Rows that changed
are refused, unless the engine says that it wrote them anew (a higher `generation`): then a new log begins.
They never replace what an earlier call has seen.
"""

import ctypes
from dataclasses import dataclass, field

import numpy as np

from tracekit.model import Array, Bits, DType, KVRows
from tracekit.recorder.arena import Arena
from tracekit.recorder.observation import SeenKV

_START = 64

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class RowChanged(Exception):
    """A row was overwritten, and its generation is the old one."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


@dataclass
class _Log:
    """Rows `first .. end - 1`, in the head-major layout `[Hkv, capacity, D]` that engines use."""

    first: int
    end: int
    generation: int
    dtype: DType
    buffers: list[Array]
    arena: Arena
    rows: KVRows | None = None

    def __post_init__(self) -> None:
        self.addresses = [_address(buffer) for buffer in self.buffers]

    def continued_by(self, rows: SeenKV, parts: list[Array]) -> bool:
        """Whether rows may be these and the next ones, by all but their bits."""
        buffers = self.buffers
        if rows.generation > self.generation or rows.keys.dtype is not self.dtype:
            return False
        if not self.first <= rows.first <= self.end or len(buffers) != len(parts):
            return False
        # No generator here and below: each call of a recording passes, and there are two parts at most.
        for buffer, part in zip(buffers, parts, strict=True):
            if buffer.shape[0] != part.shape[0] or buffer.shape[2] != part.shape[2]:
                return False
        return True

    def holds(self, parts: list[Array], first: int, count: int) -> bool:
        """Whether the first `count` rows of `parts` are those from `first` on, in bits."""
        skip = first - self.first
        for buffer, address, part in zip(self.buffers, self.addresses, parts, strict=True):
            if not _same(buffer, address, skip, count, part):
                return False
        return True

    def window(self, lo: int, hi: int) -> list[Array]:
        """Rows `lo .. hi - 1` of each buffer."""
        return [buffer[:, lo - self.first : hi - self.first] for buffer in self.buffers]

    def append(self, parts: list[Array]) -> None:
        count = parts[0].shape[1]
        used = self.end - self.first
        if used + count > self.buffers[0].shape[1]:
            capacity = max(2 * self.buffers[0].shape[1], used + count)
            for i, old in enumerate(self.buffers):
                grown = self.arena.empty((old.shape[0], capacity, old.shape[2]), old.dtype)
                grown[:, :used] = old[:, :used]
                self.buffers[i], self.addresses[i] = grown, _address(grown)
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[:, used : used + count] = part
        self.end += count

    def freeze(self) -> KVRows:
        """The whole log as rows `[N, Hkv, D]`; made once, after the engine has finished."""
        if self.rows is None:
            used = self.end - self.first
            bits = [
                Bits(np.ascontiguousarray(buffer[:, :used].transpose(1, 0, 2)), self.dtype)
                for buffer in self.buffers
            ]
            self.rows = KVRows(bits[0], bits[1] if len(bits) > 1 else None, self.first, self.generation)
            self.buffers = []
        return self.rows


@dataclass(frozen=True, eq=False)
class Extent:
    """Rows `[first, end)` of a log: what one call keeps of its KV."""

    log: _Log
    first: int
    end: int

    def rows(self) -> KVRows:
        """Return the rows, as a view of the log. Only after the last call was observed."""
        return self.log.freeze().window(self.first, self.end)


@dataclass
class KVLog:
    """The rows of one request, layer and family over a whole recording.

    `stored` counts the bytes that were copied.

    Args:
        arena: where the rows are held.
    """

    arena: Arena = field(default_factory=Arena)
    stored: int = 0
    _logs: list[_Log] = field(default_factory=list)

    def observe(self, rows: SeenKV) -> Extent:
        """Take note of the rows that a call consumed.

        Args:
            rows: borrowed; copied only where they are not held yet.

        Raises:
            RowChanged: a row is not what it was when it was last read in the same generation; the log
                stays as it was.
        """
        parts, first, end = rows.parts, rows.first, rows.end
        if self._logs:
            log = self._logs[-1]
            if log.continued_by(rows, parts):
                held = min(end, log.end) - first
                if not log.holds(parts, first, held):
                    ours, theirs = log.window(first, first + held), [part[:, :held] for part in parts]
                    raise RowChanged(first + _first_difference(ours, theirs))
                if end > log.end:
                    self._append(log, [part[:, held:] for part in parts])
                return Extent(log, first, end)
        shapes = [(p.shape[0], max(_START, p.shape[1]), p.shape[2]) for p in parts]
        log = _Log(
            rows.first,
            rows.first,
            max(self._logs[-1].generation if self._logs else 0, rows.generation),
            rows.keys.dtype,
            [self.arena.empty(shape, part.dtype) for shape, part in zip(shapes, parts, strict=True)],
            self.arena,
        )
        self._append(log, parts)
        self._logs.append(log)
        return Extent(log, rows.first, rows.end)

    def _append(self, log: _Log, parts: list[Array]) -> None:
        log.append(parts)
        self.stored += sum(part.nbytes for part in parts)


def _same(ours: Array, address: int, skip: int, count: int, part: Array) -> bool:
    """Compare the bytes of rows `skip .. skip + count - 1` of a buffer with the first rows of a part.

    Where the rows of a head lie one behind the other in the part too, in one run a head: the fastest way to
    read them, and most of what a decode step pays.
    """
    row = part.shape[2] * part.itemsize
    between, *inner = part.strides
    if inner != [row, part.itemsize]:
        return _equal(ours[:, skip : skip + count], part[:, :count])
    mine, theirs, run, step = address + skip * row, _address(part), count * row, ours.strides[0]
    for _ in range(part.shape[0]):
        if _memcmp(mine, theirs, run):
            return False
        mine, theirs = mine + step, theirs + between
    return True


def _equal(a: Array, b: Array) -> bool:
    """Compare the bytes of two `[Hkv, N, D]`, in words of 8 where both allow it."""
    size = a.itemsize
    if a.size and a.shape[-1] * size % 8 == 0 and a.strides[-1] == b.strides[-1] == size:
        a, b = a.view(np.uint64), b.view(np.uint64)
    return bool((a == b).all())


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _first_difference(ours: list[Array], theirs: list[Array]) -> int:
    rows = [np.flatnonzero((a != b).any(axis=(0, 2))) for a, b in zip(ours, theirs, strict=True)]
    return int(min(r[0] for r in rows if r.size))
