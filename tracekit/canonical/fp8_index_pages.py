"""Pages of index keys: FP8 codes of all rows of a page first, then one binary32 scale a row.

A page of B rows of D elements is `B * D` codes and `B * 4` scale bytes. DeepSeek-V4's indexer writes scales
that are powers of two, so that the value, code * scale, is a BF16 number; another scale is refused, as its
value would have to be rounded. Source: the index cache of vLLM's `models/deepseek_v4/`.
"""

import numpy as np
import numpy.typing as npt

from tracekit.canonical import fp8
from tracekit.canonical.refuse import Int64, integers, need_patterns, refuse
from tracekit.model import Array, Bits, DType

SCALE_BYTES = 4


def read_keys(cache: Array, slots: npt.ArrayLike, page_size: int, dim: int, dtype: DType) -> Bits:
    """Return the values in some slots, BF16 `[N, D]`, owned.

    Args:
        cache: uint8 `[pages, bytes]`, contiguous inside a page.
        slots: `[N]`, `page * B + offset`.
        page_size: B.
        dim: D.
        dtype: the e4m3 format.

    Raises:
        InvalidCall: `C-PAGE-SHAPE`; `C-PAGE-OUTSIDE`; `C-FP8-SCALE` a scale that is no positive power of two;
            `C-FP8-RANGE` a value that is no BF16 number.
    """
    codes, scales = _views(cache, page_size, dim)
    page, offset = _split(slots, page_size, len(cache))
    stored = np.ascontiguousarray(scales[page, offset]).view("<f4")[:, 0]
    fraction, exponent = np.frexp(stored)
    bad = fraction != 0.5
    if bad.any():
        refuse("C-FP8-SCALE", f"a scale of index keys is {float(stored[bad][0])}, no power of two.")
    return fp8.decode(
        fp8.Stored(
            Bits(codes[page, offset], dtype),
            (exponent + 126).astype(np.uint8)[:, None],
            fp8.ScaleFormat.UE8M0,
            dim,
        )
    ).bits


def write_keys(
    cache: Array, slots: npt.ArrayLike, page_size: int, keys: Bits, scales: Array, dtype: DType
) -> None:
    """Write values into some slots, in place; the inverse of `read_keys`.

    Args:
        cache: as in `read_keys`.
        slots: likewise.
        page_size: B.
        keys: BF16 `[N, D]`.
        scales: UE8M0 `[N]`; they are stored as binary32.
        dtype: the e4m3 format.

    Raises:
        InvalidCall: as `read_keys`; `C-FP8-ENCODE` when a value has no code under its scale.
    """
    dim = keys.shape[1]
    codes, stored = _views(cache, page_size, dim)
    page, offset = _split(slots, page_size, len(cache))
    codes[page, offset] = fp8.encode(keys, scales[:, None], dtype, dim).codes.data
    stored[page, offset] = (
        np.ldexp(np.float32(1), scales.astype(np.int32) - 127).astype("<f4")[:, None].view(np.uint8)
    )


def page_bytes(page_size: int, dim: int) -> int:
    """Return the bytes of a page."""
    return page_size * (dim + SCALE_BYTES)


def _views(cache: Array, page_size: int, dim: int) -> tuple[Array, Array]:
    """Codes `[pages, B, D]` and scale bytes `[pages, B, 4]`."""
    need_patterns(cache, "the cache")
    flat = cache.ndim == 2 and cache.dtype == np.uint8 and cache.shape[1] >= page_bytes(page_size, dim)
    if not flat or cache.strides[1] != 1:
        refuse(
            "C-PAGE-SHAPE",
            f"pages are contiguous uint8 [pages, {page_bytes(page_size, dim)} or more], not {cache.dtype} "
            f"{list(cache.shape)}.",
            shape=list(cache.shape),
        )
    end = page_size * dim
    codes = cache[:, :end].reshape(len(cache), page_size, dim)
    return codes, cache[:, end : page_bytes(page_size, dim)].reshape(len(cache), page_size, SCALE_BYTES)


def _split(slots: npt.ArrayLike, page_size: int, pages: int) -> tuple[Int64, Int64]:
    at = integers(slots, "slots")
    if at.size and not 0 <= at.min() <= at.max() < pages * page_size:
        refuse("C-PAGE-OUTSIDE", f"slots {int(at.min())} .. {int(at.max())} of {pages} pages.", pages=pages)
    return at // page_size, at % page_size
