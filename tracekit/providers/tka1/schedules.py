"""Legal ways to cut a launch of the C++ form and to order its work (S15), and the account of what ran.

`Schedule` and `Ran` are `tk_schedule` and `tk_ran` of kernels/tk_schedule.h.
"""

import ctypes
from collections.abc import Mapping

PATHS = ("chosen", "tiles", "streams")
ORDERS = ("as planned", "backward", "alternate")
_TAKEN = 8


class Schedule(ctypes.Structure):
    """What a launch is asked to do; 0 is as planned."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("rows", "heads", "leaves", "order", "path"))


class Ran(ctypes.Structure):
    """What a launch did, written by the threads that did it."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("threads", "path", "items", "runs", "rows", "heads")),
        ("taken", ctypes.c_int32 * _TAKEN),
    )

    def __str__(self) -> str:
        """Say it in one line."""
        taken = " ".join(map(str, self.taken[: self.items]))
        return (
            f"{PATHS[self.path]} of {self.rows} x {self.heads} rows and heads, runs {self.runs}, "
            f"items {self.items} ({taken}), threads {self.threads}"
        )

    def followed(self, asked: Schedule) -> bool:
        """Whether it did what it was asked to do."""
        expected = [_in_order(asked.order, ticket, self.items) for ticket in range(self.items)]
        return (
            (not asked.rows or self.rows <= asked.rows)
            and (not asked.heads or self.heads <= asked.heads)
            and (not asked.leaves or self.runs > 1)
            and asked.path in (0, self.path)
            and self.taken[: self.items] == expected[:_TAKEN]
        )


SCHEDULES: Mapping[str, Schedule] = {
    "tiles of one row": Schedule(rows=1),
    "tiles of 5 rows": Schedule(rows=5),
    "tiles of one head": Schedule(heads=1),
    "each leaf apart": Schedule(leaves=1),
    "runs of 2 leaves": Schedule(leaves=2),
    "work backward": Schedule(order=ORDERS.index("backward")),
    "every other item first": Schedule(order=ORDERS.index("alternate")),
    "keys in tiles": Schedule(path=PATHS.index("tiles")),
    "keys streamed": Schedule(path=PATHS.index("streams")),
    "leaves apart, backward": Schedule(rows=3, leaves=1, order=ORDERS.index("backward")),
}
"""What the provider can be asked for, by name."""


def _in_order(order: int, ticket: int, items: int) -> int:
    """`in_order` of kernels/tk_schedule.h."""
    half = (items + 1) // 2
    alternate = 2 * ticket if ticket < half else 2 * (ticket - half) + 1
    return (ticket, items - 1 - ticket, alternate)[order]
