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
        InvalidCall: `M-LAUNCH-SLOTS` when a slot is used twice or lies outside the launch.
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
