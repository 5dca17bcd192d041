"""How the rows of a page lie in an engine's cache: one description, and views that read and write rows.

Every layout here is a re-reading of the same memory, so keys and values come out as views
`[pages, B, Hkv, D]`. Gathering rows from a view and scattering rows into it are then the same two lines for
every engine, and nothing is copied before the rows are chosen.

Sources: vLLM `v1/attention/backends/` (`get_kv_cache_shape`, `v1/kv_cache_layout.py`, and `cpu_attn.py` for
the packing inside a block); FlashInfer's paged KV layouts `NHD` and `HND`.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tracekit.canonical.refuse import need_patterns, refuse
from tracekit.errors import ConventionAmbiguous
from tracekit.model import Array

Cache = Array | tuple[Array, Array]
"""One array, or keys and values apart."""


class Order(StrEnum):
    """Which comes first behind the page axis: the rows of the page (NHD) or the KV heads (HND)."""

    NHD = "NHD"
    HND = "HND"


class Place(StrEnum):
    """Where the values are, seen from the keys.

    `apart`: two arrays. `stacked`: one array with an axis of length 2, keys first. `joined`: one array whose
    last axis is D + Dv wide, key then value of a row. `packed`: for each page and head, all B keys and then
    all B values (the CPU kernels of vLLM). `shared`: one array, keys and values are the same memory (MLA
    latents, the MQA of DeepSeek-V4).
    """

    APART = "apart"
    STACKED = "stacked"
    JOINED = "joined"
    PACKED = "packed"
    SHARED = "shared"


@dataclass(frozen=True)
class PageLayout:
    """A paged KV cache.

    Args:
        page_size: B, rows of a page in this family (tokens of a block / ratio).
        kv_heads: Hkv of this rank.
        key_dim: D.
        value_dim: Dv; left out where it is D. `shared` has no values of its own.
        place: where the values are.
        order: NHD or HND; `packed` is HND by nature.
        kv_axis: the axis of length 2 of a `stacked` cache; None takes the only one that is possible.
        keys_transposed: whether `packed` keys are `[D][B]` inside a page; its values never are.

    Raises:
        InvalidCall: `C-LAYOUT` when the description contradicts itself.
    """

    page_size: int
    kv_heads: int
    key_dim: int
    value_dim: int | None = None
    place: Place = Place.JOINED
    order: Order = Order.NHD
    kv_axis: int | None = None
    keys_transposed: bool = False

    def __post_init__(self) -> None:
        if min(self.page_size, self.kv_heads, self.key_dim, self.width) < 1:
            refuse("C-LAYOUT", f"a page has at least one row, head and element, not {self}.")
        if self.place is Place.PACKED and self.order is not Order.HND:
            refuse(
                "C-LAYOUT", "a packed page belongs to one head, so its order is HND; pass order=Order.HND."
            )
        if self.place in (Place.STACKED, Place.SHARED) and self.width != self.key_dim:
            refuse(
                "C-LAYOUT",
                f"{self.place} keys and values have one width, not {self.key_dim} and {self.width}.",
            )
        if self.keys_transposed and self.place is not Place.PACKED:
            refuse(
                "C-LAYOUT", f"keys are transposed inside a packed page only, not where they are {self.place}."
            )
        if self.kv_axis is not None and self.place is not Place.STACKED:
            refuse("C-LAYOUT", f"a K/V axis belongs to a stacked cache, not to one that is {self.place}.")

    @property
    def width(self) -> int:
        """Dv."""
        return self.key_dim if self.value_dim is None else self.value_dim

    def empty(self, pages: int, dtype: npt.DTypeLike, fill: int = 0) -> Cache:
        """Return a cache of this layout, C-contiguous, every pattern `fill`.

        Args:
            pages: how many.
            dtype: unsigned integers.
            fill: what stands where no row is written; a NaN pattern or 0xA5 shows who reads it.

        Raises:
            ConventionAmbiguous: `C-KV-AXIS` for a stacked layout without `kv_axis`.
        """
        inner = (
            [self.page_size, self.kv_heads] if self.order is Order.NHD else [self.kv_heads, self.page_size]
        )

        def array(*shape: int) -> Array:
            return np.full(shape, fill, dtype)

        match self.place:
            case Place.APART:
                return array(pages, *inner, self.key_dim), array(pages, *inner, self.width)
            case Place.SHARED:
                return array(pages, *inner, self.key_dim)
            case Place.STACKED:
                shape = [pages, *inner, self.key_dim]
                shape.insert(self._stacked_axis(None), 2)
                return array(*shape)
            case _:
                return array(pages, *inner, self.key_dim + self.width)

    def pages(self, cache: Cache) -> int:
        """Return how many pages the cache has."""
        return int(self.views(cache)[0].shape[0])

    def views(self, cache: Cache) -> tuple[Array, Array | None]:
        """Return keys `[pages, B, Hkv, D]` and values `[pages, B, Hkv, Dv]`, views of the cache's memory.

        Args:
            cache: unsigned integers, any strides: `apart` `[pages, B, Hkv, D]` and `[pages, B, Hkv, Dv]`;
                `stacked` the same with one more axis of length 2; `joined` and `packed`
                `[pages, B, Hkv, D + Dv]`; `shared` `[pages, B, Hkv, D]`, or `[pages, B, D]` for one head.
                With HND the axes B and Hkv are exchanged.

        Returns:
            Values are None where they are shared with the keys.

        Raises:
            InvalidCall: `C-BITS`; `C-PAGE-SHAPE` when the cache does not have the described shape.
            ConventionAmbiguous: `C-KV-AXIS` when more than one axis, or none, can be the K/V axis.
        """
        if self.place is Place.APART:
            if not isinstance(cache, tuple):
                refuse("C-PAGE-SHAPE", "keys and values are apart: pass both arrays.", place=self.place.value)
            keys, values = cache
            if keys.shape[:1] != values.shape[:1]:
                refuse("C-PAGE-SHAPE", f"{keys.shape[0]} key pages beside {values.shape[0]} value pages.")
            return self._rows(keys, self.key_dim), self._rows(values, self.width)
        if isinstance(cache, tuple):
            refuse("C-PAGE-SHAPE", f"a {self.place} cache is one array.", place=self.place.value)
        match self.place:
            case Place.SHARED:
                if cache.ndim == 3 and self.kv_heads == 1:
                    cache = np.expand_dims(cache, 2 if self.order is Order.NHD else 1)
                return self._rows(cache, self.key_dim), None
            case Place.JOINED:
                both = self._rows(cache, self.key_dim + self.width)
                return both[..., : self.key_dim], both[..., self.key_dim :]
            case Place.STACKED:
                need_patterns(cache, "the cache")
                axis = self._stacked_axis(cache.shape)
                keys, values = (cache[(slice(None),) * axis + (part,)] for part in (0, 1))
                return self._rows(keys, self.key_dim), self._rows(values, self.width)
            case Place.PACKED:
                return self._packed(cache)

    def _rows(self, array: Array, width: int) -> Array:
        """`[pages, B, Hkv, width]` of an array in this order."""
        need_patterns(array, "the cache")
        nhd = self.order is Order.NHD
        inner = (self.page_size, self.kv_heads) if nhd else (self.kv_heads, self.page_size)
        if array.shape[1:] != (*inner, width):
            self._refuse_shape(array, ["pages", *inner, width])
        return array if nhd else array.swapaxes(1, 2)

    def _packed(self, cache: Array) -> tuple[Array, Array]:
        rows, heads, dim, width = self.page_size, self.kv_heads, self.key_dim, self.width
        if cache.shape[1:] != (heads, rows, dim + width):
            self._refuse_shape(cache, ["pages", heads, rows, dim + width])
        need_patterns(cache, "the cache")
        # numpy leaves the stride of an axis of length 1 undefined, so only longer ones are looked at.
        wanted = ((dim + width) * cache.itemsize, cache.itemsize)
        if any(n > 1 and s != w for n, s, w in zip(cache.shape[2:], cache.strides[2:], wanted, strict=True)):
            refuse(
                "C-PAGE-SHAPE",
                f"the page of a head is one piece of memory where it is packed; strides are {cache.strides}.",
                strides=list(cache.strides),
            )
        # Pages and heads may have any stride; inside, keys come first and values follow, so the shape that
        # the engine declares, D + Dv a row, says how much memory there is and nothing about what is where.
        flat = cache.reshape(cache.shape[0], heads, rows * (dim + width))
        keys, values = flat[:, :, : rows * dim], flat[:, :, rows * dim :]
        if self.keys_transposed:
            keys = keys.reshape(-1, heads, dim, rows).transpose(0, 3, 1, 2)
        else:
            keys = keys.reshape(-1, heads, rows, dim).transpose(0, 2, 1, 3)
        return keys, values.reshape(-1, heads, rows, width).transpose(0, 2, 1, 3)

    def _stacked_axis(self, shape: tuple[int, ...] | None) -> int:
        """The K/V axis, never guessed: two axes of length 2 can both look like it."""
        candidates = (
            list(range(4)) if shape is None else [a for a in range(len(shape)) if self._fits(shape, a)]
        )
        if self.kv_axis in candidates:
            return self.kv_axis
        if self.kv_axis is None and len(candidates) == 1:
            return candidates[0]
        found = f"axes {' and '.join(map(str, candidates))} can be" if candidates else "no axis is"
        text = "a new stacked cache" if shape is None else f"a cache {list(shape)}"
        declared = "not declared" if self.kv_axis is None else self.kv_axis
        raise ConventionAmbiguous(
            f"{text} of {self.page_size} rows, {self.kv_heads} heads, D {self.key_dim}, {self.order}, "
            f"K/V axis {declared}: {found} the K/V axis; declare kv_axis.",
            rule="C-KV-AXIS",
            shape=None if shape is None else list(shape),
            axes=candidates,
        )

    def _fits(self, shape: tuple[int, ...], axis: int) -> bool:
        rest = shape[:axis] + shape[axis + 1 :]
        inner = (
            (self.page_size, self.kv_heads) if self.order is Order.NHD else (self.kv_heads, self.page_size)
        )
        return shape[axis] == 2 and len(rest) == 4 and rest[1:] == (*inner, self.key_dim)

    def _refuse_shape(self, array: Array, wanted: list[str | int]) -> None:
        refuse(
            "C-PAGE-SHAPE",
            f"a {self.place} {self.order} cache is [{', '.join(map(str, wanted))}], not {list(array.shape)}.",
            shape=list(array.shape),
            place=self.place.value,
            order=self.order.value,
        )
