"""DeepSeek-V3.2's FP8 latent rows: codes, binary32 scales and BF16 rotary part, all in one row.

A row is 656 bytes: 512 e4m3 codes, 4 binary32 scales (one for each group of 128 codes), 64 BF16 rotary
elements. Scales are arbitrary, so the storage is what is canonical; the value is binary32 `[N, 1, 576]`,
codes rounded to nearest (`ValueRule.NEAREST_FLOAT32`), the rotary part widened without loss. The value part
of a key is its first 512 elements (`mla`). Source: FlashMLA's V3.2 cache; V4's pages are another format
(`fp8_ds_mla`).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.canonical import fp8
from tracekit.canonical.refuse import integers, need_patterns, refuse
from tracekit.model import Array, Bits, DType

CODES, ROPE, GROUP = 512, 64, 128
SCALES = CODES // GROUP
ROPE_AT = CODES + 4 * SCALES
ROW_BYTES = ROPE_AT + 2 * ROPE


@dataclass(frozen=True, eq=False)
class ScaledLatents:
    """The storage tier of N rows.

    Args:
        nope: codes `[N, 512]` with binary32 scales `[N, 4]`.
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
        if (
            shapes != wanted
            or self.rope.dtype is not DType.BFLOAT16
            or self.nope.group != GROUP
            or self.nope.scale_format is not fp8.ScaleFormat.FLOAT32
        ):
            refuse("C-FP8-SHAPE", f"codes, float32 scales and BF16 rope are {wanted}, not {shapes}.")

    def keys(self) -> fp8.Values:
        """Return the value tier, binary32 `[N, 1, 576]`, and its rule."""
        values = fp8.decode(self.nope)
        rope = self.rope.data.astype(np.uint32) << np.uint32(16)
        both = np.concatenate([values.bits.data, rope], axis=1)
        return fp8.Values(Bits(both[:, None], DType.FLOAT32), values.rule)


def read_rows(cache: Array, slots: npt.ArrayLike, dtype: DType) -> ScaledLatents:
    """Return the rows in some slots, owned.

    Args:
        cache: uint8 `[slots, 656]`, or `[pages, B, 656]`, contiguous inside a row.
        slots: `[N]`, `page * B + offset`.
        dtype: the e4m3 format of the cache.

    Raises:
        InvalidCall: `C-PAGE-SHAPE`; `C-PAGE-OUTSIDE` a slot outside the cache; `C-FP8-SCALE`.
    """
    data = np.ascontiguousarray(cache[_places(cache, slots)])
    scales = np.ascontiguousarray(data[:, CODES:ROPE_AT]).view("<u4").astype(np.uint32, copy=False)
    rope = np.ascontiguousarray(data[:, ROPE_AT:]).view("<u2").astype(np.uint16, copy=False)
    nope = fp8.Stored(Bits(data[:, :CODES], dtype), scales, fp8.ScaleFormat.FLOAT32, GROUP)
    return ScaledLatents(nope, Bits(rope, DType.BFLOAT16))


def write_rows(cache: Array, slots: npt.ArrayLike, rows: ScaledLatents) -> None:
    """Write rows into some slots, in place; the inverse of `read_rows`.

    Raises:
        InvalidCall: `C-PAGE-SHAPE`, `C-PAGE-OUTSIDE`; `C-PAGE-TWICE` two rows for one slot; `C-ROW-SHAPE`
            when there are not as many rows as slots.
    """
    places = _places(cache, slots)
    flat = integers(slots, "slots")
    if flat.size != len(rows.rope.data):
        refuse("C-ROW-SHAPE", f"{len(rows.rope.data)} rows for {flat.size} slots.")
    if np.unique(flat).size != flat.size:
        refuse("C-PAGE-TWICE", "two rows for one slot.")
    parts = [
        rows.nope.codes.data,
        np.ascontiguousarray(rows.nope.scales.astype("<u4", copy=False)).view(np.uint8),
        rows.rope.data.astype("<u2", copy=False).view(np.uint8),
    ]
    cache[places] = np.concatenate(parts, axis=1)


def _places(cache: Array, slots: npt.ArrayLike) -> tuple[Array, ...]:
    """The index of each slot in the leading axes of the cache."""
    need_patterns(cache, "the cache")
    if cache.dtype != np.uint8 or cache.ndim not in (2, 3) or cache.shape[-1] != ROW_BYTES:
        refuse(
            "C-PAGE-SHAPE",
            f"rows are uint8 [..., {ROW_BYTES}], not {cache.dtype} {list(cache.shape)}.",
            shape=list(cache.shape),
        )
    flat, count = integers(slots, "slots"), int(np.prod(cache.shape[:-1]))
    if flat.size and not 0 <= flat.min() <= flat.max() < count:
        refuse("C-PAGE-OUTSIDE", f"slots {int(flat.min())} .. {int(flat.max())} of {count}.", slots=count)
    return np.unravel_index(flat, cache.shape[:-1])
