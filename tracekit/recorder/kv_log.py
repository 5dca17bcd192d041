"""The KV row log: each row of one request, layer and family is held once, however often it is read.

A decode of 512 steps reads the same rows 512 times. On each call the rows that the kernel consumed are
compared, byte by byte, with those already held: equal rows become a view of the log. Rows that changed
are refused, unless the engine says that it wrote them anew (a higher `generation`): then a new log begins.
They never replace what an earlier call has seen.
"""

from dataclasses import dataclass, field

import numpy as np

from tracekit.model import Array, Bits, DType, KVRows
from tracekit.recorder.arena import Arena
from tracekit.recorder.observation import ReadKV, SeenKV
from tracekit.recorder.strip import Strip, address_of

_START = 64


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
        self.addresses = [address_of(buffer) for buffer in self.buffers]

    def continued_by(self, rows: SeenKV | ReadKV, strips: tuple[Strip, ...]) -> bool:
        """Whether rows may be these and the next ones, by all but their bits."""
        buffers = self.buffers
        if rows.generation > self.generation or len(buffers) != len(strips):
            return False
        if not self.first <= rows.first <= self.end:
            return False
        # No generator here and below: each call of a recording passes, and there are two parts at most.
        for buffer, strip in zip(buffers, strips, strict=True):
            heads, _, width = buffer.shape
            if strip.dtype is not self.dtype or (heads, width * buffer.itemsize) != (
                strip.heads,
                strip.width,
            ):
                return False
        return True

    def holds(self, strips: tuple[Strip, ...], first: int, count: int) -> bool:
        """Whether the first `count` rows of `strips` are those from `first` on, in bits."""
        skip = first - self.first
        for buffer, address, strip in zip(self.buffers, self.addresses, strips, strict=True):
            if not strip.same(address + skip * strip.width, buffer.strides[0], count):
                return False
        return True

    def first_change(self, strips: tuple[Strip, ...], first: int, count: int) -> int:
        """The first row of those of which `holds` said no."""
        ours = [buffer[:, first - self.first : first - self.first + count] for buffer in self.buffers]
        theirs = [strip.array()[:, :count].view(self.dtype.container) for strip in strips]
        found = [np.flatnonzero((a != b).any(axis=(0, 2))) for a, b in zip(ours, theirs, strict=True)]
        return first + int(min(rows[0] for rows in found if rows.size))

    def append(self, strips: tuple[Strip, ...], skip: int) -> None:
        """Take over all rows but the first `skip`."""
        count = strips[0].rows - skip
        used = self.end - self.first
        if used + count > self.buffers[0].shape[1]:
            self._grow(used, max(2 * self.buffers[0].shape[1], used + count))
        for buffer, address, strip in zip(self.buffers, self.addresses, strips, strict=True):
            strip.copy(address + used * strip.width, buffer.strides[0], skip)
        self.end += count

    def _grow(self, used: int, capacity: int) -> None:
        for i, old in enumerate(self.buffers):
            grown = self.arena.empty((old.shape[0], capacity, old.shape[2]), old.dtype)
            grown[:, :used] = old[:, :used]
            self.buffers[i], self.addresses[i] = grown, address_of(grown)

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

    def observe(self, rows: SeenKV | ReadKV) -> Extent:
        """Take note of the rows that a call consumed.

        Args:
            rows: borrowed; copied only where they are not held yet.

        Raises:
            RowChanged: a row is not what it was when it was last read in the same generation; the log
                stays as it was.
        """
        strips, first, end = rows.strips, rows.first, rows.end
        if self._logs:
            log = self._logs[-1]
            if log.continued_by(rows, strips):
                held = min(end, log.end) - first
                if not log.holds(strips, first, held):
                    raise RowChanged(log.first_change(strips, first, held))
                if end > log.end:
                    self._append(log, strips, held)
                return Extent(log, first, end)
        log = _Log(
            first,
            first,
            max(self._logs[-1].generation if self._logs else 0, rows.generation),
            strips[0].dtype,
            [self._room(strip) for strip in strips],
            self.arena,
        )
        self._append(log, strips, 0)
        self._logs.append(log)
        return Extent(log, first, end)

    def _room(self, strip: Strip) -> Array:
        kind = strip.dtype.container
        return self.arena.empty((strip.heads, max(_START, strip.rows), strip.width // kind.itemsize), kind)

    def _append(self, log: _Log, strips: tuple[Strip, ...], skip: int) -> None:
        log.append(strips, skip)
        for strip in strips:
            self.stored += strip.heads * strip.width * (strip.rows - skip)
