"""The rows of requests in vLLM's paged cache for the CPU, read back as the kernels read them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tracekit.canonical.paged import page_slots
from tracekit.errors import Unsupported
from tracekit.model import Array, DType
from tracekit.providers.vllm_cpu_cache import FLOAT8, decode
from tracekit.providers.vllm_cpu_packing import packing

_NULL_PAGE = 0
"""vLLM gives block 0 to nobody and fills tables with it."""
_FP8_NAMES = {"fp8": "fp8_e4m3"}


@dataclass(frozen=True, eq=False)
class StoredRows:
    """KV rows of one request as they lie in the cache, and where they begin.

    Args:
        keys: `[Hkv, N, D]`.
        values: likewise.
        first: logical index of row 0.
    """

    keys: Array
    values: Array
    first: int


@dataclass(frozen=True, eq=False)
class PagedCache:
    """The cache of one layer.

    Args:
        layer: the name of the layer, for errors.
        pages: `[blocks, Hkv, page_size, 2 * D]`.
        isa: the code path, which decides how a page is packed.
        dtype: of the model.
        kv_dtype: `auto`, or vLLM's name of an FP8 dtype.
        k_scale: a stored key times this is the value.
        v_scale: likewise for values.
    """

    layer: str
    pages: torch.Tensor
    isa: str
    dtype: torch.dtype
    kv_dtype: str
    k_scale: float
    v_scale: float

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return int(self.pages.shape[2])

    @property
    def head_dim(self) -> int:
        """D."""
        return int(self.pages.shape[3]) // 2

    def rows(self, table: Array, first: int, end: int) -> StoredRows:
        """Read rows `[first, end)` of one request back from the pages that its table names.

        Rows before `first` are not touched: behind a window their pages may long be those of other rows.

        Raises:
            InvalidCall: `C-PAGE-...` when the table gives a row no page of its own.
        """
        blocks, heads, page, _ = self.pages.shape
        dim = self.head_dim
        slots = page_slots(table, np.arange(first, end), page, pages=blocks, null_page=_NULL_PAGE)
        used = slots[np.r_[True, np.diff(slots // page) != 0]] // page
        cache_rows = self.pages.view(blocks, heads, 2 * page, dim)
        raw = cache_rows[torch.from_numpy(used).to(self.pages.device)].cpu()
        words = raw.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[raw.itemsize])
        stored = words.numpy().reshape(used.size, heads, -1)
        stored = stored.view(np.dtype(f"u{stored.itemsize}"))
        order = packing(self.isa, self.dtype, self.kv_dtype, page, dim)
        skip = first - first // page * page
        keys, values = (
            part.transpose(1, 0, 2, 3).reshape(heads, -1, dim)[:, skip : skip + end - first]
            for part in order.unpack(stored, dim)
        )
        return StoredRows(keys, values, first)

    def values(self, rows: StoredRows, dtype: DType) -> tuple[Array, Array]:
        """Return stored keys and values `[Hkv, N, D]` as patterns of the model's dtype.

        Raises:
            Unsupported: `V-FP8` when an FP8 value is not exact in that dtype.
        """
        kind = FLOAT8.get(self.kv_dtype)
        if kind is None:
            return rows.keys, rows.values
        parts = []
        for stored, scale in ((rows.keys, self.k_scale), (rows.values, self.v_scale)):
            bits = decode(np.ascontiguousarray(stored), kind, scale, dtype)
            if bits is None:
                raise Unsupported(
                    f"layer {self.layer} stores {kind.value} times {scale}, which is not exact in "
                    f"{dtype.value}; use scales that are powers of two, so that the rows are the values "
                    "that the kernel reads.",
                    rule="V-FP8",
                    layer=self.layer,
                    scale=scale,
                )
            parts.append(bits.data)
        return parts[0], parts[1]


def cache_of(layer: Any, impl: Any, pages: torch.Tensor, isa: str, dtype: torch.dtype) -> PagedCache:
    """Return the cache of a layer as its implementation was told that it is."""
    scales = (float(getattr(layer, f"{side}_scale_float")) for side in ("_k", "_v"))
    name = getattr(layer, "layer_name", type(layer).__name__)
    return PagedCache(name, pages, isa, dtype, kv_dtype_of(impl, pages, dtype), *scales)


def kv_dtype_of(impl: Any, pages: torch.Tensor, dtype: torch.dtype) -> str:
    """Return what a cache stores: `auto` for the dtype of the model, or vLLM's name of an FP8 dtype."""
    name = str(impl.kv_cache_dtype)
    return "auto" if pages.dtype == dtype else _FP8_NAMES.get(name, name)
