"""`fp8_ds_mla` pages: DeepSeek-V4's rows of FP8 and BF16 parts, their scales at the end of the page.

A row is 448 e4m3 codes and 64 BF16 rotary elements, 576 bytes. A page of B rows holds the rows first
(`B * 576` bytes), then 8 scale bytes a row (`B * 8`): one UE8M0 scale for each group of 64 codes, 7 used and
1 pad. The page is padded to a multiple of 576 bytes (64 rows: 36 864 + 512 = 37 376, padded to 37 440). Keys
and values are one tensor; its value is BF16 `[N, 1, 512]`, exact (see `fp8`). DeepSeek-V3.2's 656-byte rows
are another format. Source: the caches of vLLM's `models/deepseek_v4/`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.canonical import fp8
from tracekit.canonical.refuse import Int64, integers, need_patterns, refuse
from tracekit.model import Array, Bits, DType

CODES, ROPE, GROUP, SCALE_BYTES = 448, 64, 64, 8
ROW_BYTES = CODES + 2 * ROPE
SCALES = CODES // GROUP


@dataclass(frozen=True, eq=False)
class LatentStorage:
    """The storage tier of N rows.

    Args:
        nope: codes `[N, 448]` with scales `[N, 7]`.
        rope: BF16 `[N, 64]`.

    Raises:
        InvalidCall: `C-FP8-SHAPE`.
    """

    nope: fp8.Stored
    rope: Bits

    def __post_init__(self) -> None:
        rows = len(self.rope.data)
        shapes = (self.nope.codes.shape, self.nope.scales.shape, self.rope.shape)
        wanted = ((rows, CODES), (rows, SCALES), (rows, ROPE))
        if shapes != wanted or self.rope.dtype is not DType.BFLOAT16 or self.nope.group != GROUP:
            refuse(
                "C-FP8-SHAPE", f"codes, scales and BF16 rope are {[list(w) for w in wanted]}, not {shapes}."
            )

    def keys(self) -> Bits:
        """Return the value tier, BF16 `[N, 1, 512]`.

        Raises:
            InvalidCall: `C-FP8-RANGE`.
        """
        parts = [fp8.decode(self.nope).bits.data, self.rope.data]
        return Bits(np.concatenate(parts, axis=1)[:, None], DType.BFLOAT16)


def from_keys(keys: Bits, scales: Array, dtype: DType) -> LatentStorage:
    """Return the storage of values under given scales; the inverse of `LatentStorage.keys`.

    Args:
        keys: BF16 `[N, 1, 512]`.
        scales: UE8M0 `[N, 7]`.
        dtype: the e4m3 format.

    Raises:
        InvalidCall: `C-FP8-SHAPE`; `C-FP8-ENCODE` when a value has no code under its scale.
    """
    if keys.dtype is not DType.BFLOAT16 or len(keys.shape) != 3 or keys.shape[1:] != (1, CODES + ROPE):
        refuse("C-FP8-SHAPE", f"rows are bfloat16 [N, 1, {CODES + ROPE}], not {keys}.")
    nope = fp8.encode(keys.part((slice(None), 0, slice(CODES))), scales, dtype, GROUP)
    return LatentStorage(nope, keys.part((slice(None), 0, slice(CODES, None))))


@dataclass(frozen=True)
class LatentPages:
    """A cache of `fp8_ds_mla` pages.

    Args:
        page_size: B, rows of a page in this family (64 for the recent window, block size / ratio else).
        dtype: e4m3 format of this cache. It is declared and never assumed: gfx942 may hold its recent window
            in the fnuz format beside compressed rows in the OCP format; a byte is another number in each.
    """

    page_size: int
    dtype: DType

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.dtype not in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E4M3FNUZ):
            refuse("C-LAYOUT", f"pages of {self.page_size} rows of {self.dtype}; e4m3fn or e4m3fnuz.")

    @property
    def used_bytes(self) -> int:
        """Bytes of a page that hold rows and scales."""
        return self.page_size * (ROW_BYTES + SCALE_BYTES)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page with its padding."""
        return -(-self.used_bytes // ROW_BYTES) * ROW_BYTES

    def empty(self, pages: int, fill: int = 0) -> Array:
        """Return a cache, uint8 `[pages, page_bytes]`, every byte `fill`."""
        return np.full((pages, self.page_bytes), fill, np.uint8)

    def read(self, cache: Array, slots: npt.ArrayLike) -> LatentStorage:
        """Return the rows in some slots, owned.

        Args:
            cache: uint8 `[pages, bytes]`; at least `used_bytes` a page, contiguous inside the page.
            slots: `[N]`, `page * B + offset` (`paged.page_slots`, `ring.ring_slots`).

        Raises:
            InvalidCall: `C-PAGE-SHAPE`; `C-PAGE-OUTSIDE` a slot outside the cache; `C-FP8-SCALE`.
        """
        rows, scales = self._views(cache)
        page, offset = self._split(cache, slots)
        data = rows[page, offset]
        nope = fp8.Stored(
            Bits(data[:, :CODES], self.dtype),
            scales[page, offset, :SCALES],
            fp8.ScaleFormat.UE8M0,
            GROUP,
        )
        rope = np.ascontiguousarray(data[:, CODES:]).view("<u2").astype(np.uint16, copy=False)
        return LatentStorage(nope, Bits(rope, DType.BFLOAT16))

    def write(self, cache: Array, slots: npt.ArrayLike, storage: LatentStorage) -> None:
        """Write rows into some slots, in place; the inverse of `read`. The pad byte stays as it is.

        Raises:
            InvalidCall: `C-PAGE-SHAPE`, `C-PAGE-OUTSIDE`; `C-PAGE-TWICE` two rows for one slot;
                `C-ROW-SHAPE` when the rows do not fit slots or format.
        """
        rows, scales = self._views(cache)
        page, offset = self._split(cache, slots)
        codes = storage.nope.codes
        if codes.dtype is not self.dtype or len(codes.data) != page.size:
            refuse("C-ROW-SHAPE", f"{codes} for {page.size} slots of a {self.dtype} cache.")
        if np.unique(page * self.page_size + offset).size != page.size:
            refuse("C-PAGE-TWICE", "two rows for one slot.")
        rows[page, offset, :CODES] = codes.data
        rows[page, offset, CODES:] = storage.rope.data.astype("<u2", copy=False).view(np.uint8)
        scales[page, offset, :SCALES] = storage.nope.scales

    def _views(self, cache: Array) -> tuple[Array, Array]:
        """Rows `[pages, B, 576]` and scales `[pages, B, 8]`."""
        need_patterns(cache, "the cache")
        flat = cache.ndim == 2 and cache.dtype == np.uint8 and cache.shape[1] >= self.used_bytes
        if not flat or cache.strides[1] != 1:
            refuse(
                "C-PAGE-SHAPE",
                f"pages are contiguous uint8 [pages, {self.used_bytes} or more], not {cache.dtype} "
                f"{list(cache.shape)} with strides {cache.strides}.",
                shape=list(cache.shape),
            )
        pages, end = cache.shape[0], self.page_size * ROW_BYTES
        rows = cache[:, :end].reshape(pages, self.page_size, ROW_BYTES)
        return rows, cache[:, end : self.used_bytes].reshape(pages, self.page_size, SCALE_BYTES)

    def _split(self, cache: Array, slots: npt.ArrayLike) -> tuple[Int64, Int64]:
        at = integers(slots, "slots")
        if at.size and not 0 <= at.min() <= at.max() < cache.shape[0] * self.page_size:
            refuse(
                "C-PAGE-OUTSIDE",
                f"slots {int(at.min())} .. {int(at.max())} of {cache.shape[0]} pages of {self.page_size}.",
                pages=cache.shape[0],
            )
        return at // self.page_size, at % self.page_size
