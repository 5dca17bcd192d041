"""Sparse selections: from the slots that a kernel is given to the logical rows that it read, and back.

A kernel's indices are `page * B + offset` in a cache (FlashMLA, vLLM), -1 where a list is short. A prefill of
vLLM first gathers the rows of each request into one flat workspace, M rows a request, its N compressed rows
before its recent ones; there an index is `M * b + i`, or `M * b + N + j` for the recent row j. Either way an
index means something only together with its request, so it is mapped back through the rows that the request
really has; an index that leads nowhere is a physical id that leaked, and is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.canonical.refuse import Int64, first_true, integers, refuse
from tracekit.model import Lists


@dataclass(frozen=True, eq=False)
class LiveSlots:
    """The slots of the rows `first .. first + n - 1` of one request and family.

    Args:
        slots: int64 `[n]`, from `page_slots`, `ring_slots` or `pool_slots`.
        first: logical index of the first.

    Raises:
        InvalidCall: `C-SEL-SLOTS` when a slot is below 0 or holds two rows.
    """

    slots: Int64
    first: int = 0

    def __post_init__(self) -> None:
        slots = integers(self.slots, "slots")
        object.__setattr__(self, "slots", slots)
        if self.first < 0 or (slots.size and (slots.min() < 0 or np.unique(slots).size != slots.size)):
            refuse("C-SEL-SLOTS", f"each row from {self.first} on has a slot of its own, at least 0.")

    def logical(self, slots: Int64) -> Int64:
        """Return the logical row of each slot; -1 where the request has no row there."""
        if not self.slots.size:
            return np.full(slots.shape, -1, np.int64)
        order = np.argsort(self.slots)
        at = order[np.minimum(np.searchsorted(self.slots, slots, sorter=order), order.size - 1)]
        return np.where(self.slots[at] == slots, at + self.first, -1)

    def physical(self, rows: Int64) -> Int64:
        """Return the slot of each logical row; -1 where it is not live."""
        held = (rows >= self.first) & (rows < self.first + self.slots.size)
        found = np.full(rows.shape, -1, np.int64)
        found[held] = self.slots[rows[held] - self.first]
        return found


def to_logical(
    indices: npt.ArrayLike,
    request: npt.ArrayLike,
    live: Sequence[LiveSlots],
    lengths: npt.ArrayLike | None = None,
) -> Lists:
    """Return the logical rows that each query row read, in executed order, holes left out.

    Args:
        indices: `[T, K]`, physical; -1 for a hole.
        request: `[T]`, the request of each query row, an index into `live`.
        live: the rows of each request.
        lengths: `[T]`, how many of the K entries the kernel looks at (FlashMLA's `topk_length`), or None.

    Raises:
        InvalidCall: `C-SEL-SHAPE`; `C-SEL-PHYSICAL` an index that is no live row of its request; and
            `M-SEL-DUPLICATE` a row that is read twice.
    """
    table, owner = integers(indices, "indices", ndim=2), _owners(request, len(live))
    if owner.size != len(table):
        refuse("C-SEL-SHAPE", f"{len(table)} lists for {owner.size} query rows.")
    used = table != -1
    if lengths is not None:
        counts = integers(lengths, "lengths")
        if counts.shape != owner.shape or (counts < 0).any() or (counts > table.shape[1]).any():
            refuse("C-SEL-SHAPE", f"lengths of {owner.size} lists of {table.shape[1]}.")
        used &= np.arange(table.shape[1]) < counts[:, None]
    rows = np.full(table.shape, -1, np.int64)
    for number, one in enumerate(live):
        mine = owner == number
        rows[mine] = one.logical(table[mine])
    _need_live(used & (rows < 0), table, owner)
    return Lists(rows[used], np.concatenate([[0], np.cumsum(used.sum(1))]).astype(np.int64))


def to_physical(
    lists: Lists, request: npt.ArrayLike, live: Sequence[LiveSlots], width: int | None = None
) -> npt.NDArray[np.int32]:
    """Return indices int32 `[T, width]`, -1 behind each list; the inverse of `to_logical`.

    Args:
        lists: logical rows.
        request: `[T]`, as in `to_logical`.
        live: the rows of each request.
        width: K; None for the longest list.

    Raises:
        InvalidCall: `C-SEL-SHAPE` a list longer than `width`, or a slot past int32; `C-SEL-PHYSICAL` a row
            that is not live.
    """
    owner = _owners(request, len(live))
    counts = np.diff(lists.offsets)
    columns = int(counts.max(initial=0)) if width is None else width
    if owner.size != lists.rows or (counts > columns).any():
        refuse("C-SEL-SHAPE", f"lists of up to {int(counts.max(initial=0))} rows in {columns} columns.")
    used = np.arange(columns) < counts[:, None]
    rows = np.full(used.shape, -1, np.int64)
    rows[used] = lists.ids
    slots = np.full(used.shape, -1, np.int64)
    for number, one in enumerate(live):
        mine = owner == number
        slots[mine] = np.where(used[mine], one.physical(rows[mine]), -1)
    _need_live(used & (slots < 0), rows, owner)
    if slots.size and slots.max() > np.iinfo(np.int32).max:
        refuse("C-SEL-SHAPE", f"slot {int(slots.max())} does not fit the int32 of an index.")
    return slots.astype(np.int32)


@dataclass(frozen=True)
class Workspace:
    """A flat gather of several requests.

    Args:
        stride: M, rows of the workspace a request.
        compressed: N, rows of it that are kept for compressed rows, before the recent ones; 0 for none.

    Raises:
        InvalidCall: `C-SEL-WORKSPACE` when N does not fit M.
    """

    stride: int
    compressed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.compressed <= self.stride or self.stride < 1:
            refuse("C-SEL-WORKSPACE", f"{self.compressed} compressed rows in a stride of {self.stride}.")

    def compressed_rows(self, request: int, count: int) -> LiveSlots:
        """Return the live slots of the first `count` compressed rows of a request.

        Raises:
            InvalidCall: `C-SEL-WORKSPACE` when there are more than N.
        """
        return self._live(request, 0, count, self.compressed, 0)

    def recent_rows(self, request: int, first: int, count: int) -> LiveSlots:
        """Return the live slots of the recent rows `first .. first + count - 1` of a request.

        Raises:
            InvalidCall: `C-SEL-WORKSPACE` when there are more than M - N.
        """
        return self._live(request, self.compressed, count, self.stride - self.compressed, first)

    def _live(self, request: int, offset: int, count: int, room: int, first: int) -> LiveSlots:
        if request < 0 or not 0 <= count <= room:
            refuse("C-SEL-WORKSPACE", f"{count} rows of request {request} in a room of {room}.", room=room)
        begin = self.stride * request + offset
        return LiveSlots(np.arange(begin, begin + count, dtype=np.int64), first)


def split_families(
    indices: npt.ArrayLike, request: npt.ArrayLike, families: Sequence[Sequence[LiveSlots]]
) -> list[Lists]:
    """Return one selection a family of index lists that run through several families of one workspace.

    Each family keeps its own order. An order that mixes families has no word in the model (families are read
    one after the other), so it is refused.

    Args:
        indices: `[T, K]`, into the workspace; -1 for a hole.
        request: `[T]`, the request of each query row.
        families: for each family, in executed order, the live slots of each request.

    Raises:
        InvalidCall: as `to_logical`; `C-SEL-MIXED` when rows of an earlier family stand behind a later one.
    """
    table = integers(indices, "indices", ndim=2)
    if not families or len({len(live) for live in families}) != 1:
        refuse("C-SEL-SHAPE", "each family has the live slots of the same requests.")
    owner = _owners(request, len(families[0]))
    if owner.size != len(table):
        refuse("C-SEL-SHAPE", f"{len(table)} lists for {owner.size} query rows.")
    kind = np.full(table.shape, -1, np.int64)
    for place, live in enumerate(families):
        for number, one in enumerate(live):
            mine = owner == number
            kind[mine] = np.where(one.logical(table[mine]) >= 0, place, kind[mine])
    _need_live((table != -1) & (kind < 0), table, owner)
    latest = np.maximum.accumulate(kind, axis=1)
    turns = (kind >= 0) & (kind < latest)
    mixed = first_true(np.asarray(turns.any(axis=1)))
    if mixed is not None:
        refuse(
            "C-SEL-MIXED",
            f"query row {mixed} reads its families in turns, not one after the other.",
            row=mixed,
        )
    return [
        to_logical(np.where(kind == place, table, -1), owner, live) for place, live in enumerate(families)
    ]


def _owners(request: npt.ArrayLike, requests: int) -> Int64:
    owner = integers(request, "request")
    if owner.size and not 0 <= owner.min() <= owner.max() < requests:
        refuse("C-SEL-SHAPE", f"a query row of request {int(owner.max())} of {requests}.")
    return owner


def _need_live(bad: npt.NDArray[np.bool_], ids: Int64, owner: Int64) -> None:
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        refuse(
            "C-SEL-PHYSICAL",
            f"query row {row}, entry {column}: {int(ids[row, column])} is no live row of request "
            f"{int(owner[row])}.",
            row=row,
            entry=column,
            id=int(ids[row, column]),
            request=int(owner[row]),
        )
