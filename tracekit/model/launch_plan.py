"""The physical side of a call: what is needed to run the engine's own kernel on its own launch again.

It lies outside the content digest: pages, padding and batch layout say nothing about the mathematics.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall
from tracekit.model.bits import Array

Scalar = int | float | str | bool | None


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """One launch as the engine made it.

    Args:
        kernel: the kernel that was launched, such as `transformers.sdpa`.
        row_slots: int64 `[T]`, the slot of each logical row among the launch's query slots.
        slots: query slots of the launch, padding included.
        head_padding: query heads that were added and dropped.
        page_size: KV rows of a page; None where KV is contiguous.
        block_tables: int32 `[pages]` a request, in the order of `Rows.requests`; empty without pages.
        cu_seqlens: int32 `[R + 1]` query starts of a packed launch; None where not packed.
        scalars: host arguments by name (lengths, split caps, flags), as they were passed.
        arrays: other arguments by name (scheduler metadata, masks, storage bytes, scales).

    Raises:
        InvalidCall: `M-LAUNCH-SLOTS` when a slot is used twice or lies outside the launch, or a count is
            below 0; `M-LAUNCH-PAGES` for pages below 0, or without a size; `M-LAUNCH-SEQUENCES` for starts
            that do not rise from 0 inside the launch.
    """

    kernel: str
    row_slots: npt.NDArray[np.int64]
    slots: int
    head_padding: int = 0
    page_size: int | None = None
    block_tables: tuple[npt.NDArray[np.int32], ...] = ()
    cu_seqlens: npt.NDArray[np.int32] | None = None
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.slots, self.head_padding) < 0:
            raise InvalidCall(
                f"a launch has {self.slots} query slots and {self.head_padding} added heads; "
                "neither is below 0.",
                rule="M-LAUNCH-SLOTS",
            )
        self._check_pages()
        self._check_sequences()
        slots = np.array(self.row_slots, np.int64, copy=True)
        slots.flags.writeable = False
        object.__setattr__(self, "row_slots", slots)
        if slots.size and (
            slots.min() < 0 or slots.max() >= self.slots or np.unique(slots).size != slots.size
        ):
            raise InvalidCall(
                f"each row has a query slot of its own in [0, {self.slots}).",
                rule="M-LAUNCH-SLOTS",
                slots=self.slots,
            )

    def _check_pages(self) -> None:
        if (self.page_size is not None and self.page_size < 1) or (
            self.block_tables and self.page_size is None
        ):
            raise InvalidCall(
                f"a page holds at least one row, and block tables need its size, not {self.page_size}.",
                rule="M-LAUNCH-PAGES",
            )
        for number, table in enumerate(self.block_tables):
            if table.dtype != np.int32 or table.ndim != 1 or table.min(initial=0) < 0:
                raise InvalidCall(
                    f"block table {number} is int32 [pages], each page at least 0, not {table.dtype} "
                    f"{list(table.shape)} from {table.min(initial=0)}; leave unused pages out.",
                    rule="M-LAUNCH-PAGES",
                    table=number,
                )

    def _check_sequences(self) -> None:
        starts = self.cu_seqlens
        if starts is None:
            return
        whole = starts.dtype == np.int32 and starts.ndim == 1 and starts.size > 0
        if not whole or starts[0] != 0 or starts[-1] > self.slots or (np.diff(starts) < 0).any():
            raise InvalidCall(
                f"cu_seqlens is int32 [R + 1] and rises from 0 to at most {self.slots} slots, "
                f"not {starts.dtype} {starts.tolist()[:8]}.",
                rule="M-LAUNCH-SEQUENCES",
            )
