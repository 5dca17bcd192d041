"""Where a launch lies in memory: what a claim may vary, and no answer may depend on.

A `Placement` is asked of a provider that says in its capabilities that it takes it. What it speaks of is
physical alone: rows, keys, values and selections of the call are the same under every placement.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tracekit.canonical.page_layout import Order, PageLayout, Place
from tracekit.model import AttentionCall, DType

NULL_PAGE = 0
"""The page that belongs to no request; engines fill the ends of tables with it."""


class Layout(StrEnum):
    """How the rows of a page lie: where values are (`Place`), and heads or rows first (`Order`).

    `heads_first` packs a page like `packed`, and all pages of one head lie before those of the next.
    """

    JOINED_NHD = "joined NHD"
    JOINED_HND = "joined HND"
    STACKED_NHD = "stacked NHD"
    STACKED_HND = "stacked HND"
    APART_NHD = "apart NHD"
    APART_HND = "apart HND"
    PACKED = "packed"
    PACKED_TRANSPOSED = "packed, keys transposed"
    HEADS_FIRST = "packed, heads first"

    @property
    def place(self) -> Place:
        """Where the values are."""
        return Place.PACKED if self is Layout.HEADS_FIRST else Place(self.value.split()[0].rstrip(","))

    @property
    def order(self) -> Order:
        """Whether rows or heads come first behind the page."""
        return Order.NHD if self.value.endswith("NHD") else Order.HND

    def pages(self, call: AttentionCall, page_size: int) -> PageLayout:
        """Return the layout of pages of the KV of a call."""
        shared = call.any_kv.shared
        return PageLayout(
            page_size,
            call.num_kv_heads,
            call.head_dim,
            call.value_dim,
            place=Place.SHARED if shared else self.place,
            order=self.order,
            kv_axis=1 if self.place is Place.STACKED and not shared else None,
            keys_transposed=self is Layout.PACKED_TRANSPOSED and not shared,
        )

    def memory(self, call: AttentionCall) -> tuple[object, ...] | None:
        """Return what tells this layout apart for the KV of a call; None where it cannot hold it.

        With one KV head the order of heads and rows is no difference, nor is the place of values that are
        the keys.
        """
        if self.place is Place.STACKED and call.head_dim != call.value_dim:
            return None
        shared, several = call.any_kv.shared, call.num_kv_heads > 1
        values = (Place.SHARED, False) if shared else (self.place, self is Layout.PACKED_TRANSPOSED)
        return (*values, several and self.order, several and self is Layout.HEADS_FIRST)


class Padding(StrEnum):
    """What a launch may hold beside its rows: query slots, query heads of each KV head, requests."""

    ROWS = "query slots"
    HEADS = "heads"
    REQUESTS = "requests"


class Fill(StrEnum):
    """What stands in memory that belongs to no row: a leak shows as NaN, or as a number."""

    NANS = "NaN payloads"
    A5 = "bytes 0xA5"

    def pattern(self, dtype: DType) -> int:
        """Return the bits of one element: a quiet NaN with payload 1, or 0xA5 in each byte."""
        size = dtype.container.itemsize
        return _NANS[dtype] if self is Fill.NANS else int.from_bytes(b"\xa5" * size, "little")


_NANS = {
    DType.BFLOAT16: 0x7FC1,
    DType.FLOAT16: 0x7E01,
    DType.FLOAT32: 0x7FC00001,
    DType.FLOAT8_E4M3FN: 0x7F,
    DType.FLOAT8_E4M3FNUZ: 0x80,
    DType.FLOAT8_E5M2: 0x7F,
}


@dataclass(frozen=True)
class Placement:
    """Where one launch lies.

    Pages are numbered from 1; page 0 is null. It, the pages that no table names, and the rows of a page
    behind the last one of its request are hot: they hold numbers of the size of real rows, so that a kernel
    that reads them gives another answer.

    Args:
        page_size: rows of a page; None is the kernel's own.
        shuffle: seed of random page numbers; None numbers them in the order of requests.
        gaps: unused pages, on average, before each page.
        layout: of a page; None is the kernel's own.
        padding: how much of each kind is added: query slots, heads of each group, requests.
        fill: what stands instead of hot numbers, and in added query slots, in outputs before the launch and
            around every buffer of the launch that the provider can place; None is hot numbers.
    """

    page_size: int | None = None
    shuffle: int | None = None
    gaps: int = 0
    layout: Layout | None = None
    padding: dict[Padding, int] = field(default_factory=dict)
    fill: Fill | None = None

    def pages(self, count: int) -> tuple[npt.NDArray[np.int32], int]:
        """Return int32 `[count]`, the number of each page in the order of requests, and the pages in all."""
        total = 1 + count * (1 + self.gaps)
        if self.shuffle is None:
            names = total - 1 - np.arange(count)[::-1] * (1 + self.gaps)
        else:
            names = 1 + np.random.default_rng(self.shuffle).permutation(total - 1)[:count]
        return names.astype(np.int32), total
