"""How a page of vLLM's CPU cache is packed: asked of vLLM's own writer, not assumed.

Each code path stores a page in an order of its own (keys transposed for vector code, interleaved in pairs for
AMX tiles), and a newer version may choose another. So the writer is given pages that are coded by row and
element, and the order is read back. What is not one place an element is refused.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from tracekit.errors import Unsupported
from tracekit.model import Array
from tracekit.providers.vllm_cpu_ops import operators

Order = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Packing:
    """The order of one page and one KV head.

    Args:
        keys: int64 `[page_size * D]`, where element `row * D + d` of the keys stands in the first half.
        values: likewise for the values, in the second half.
    """

    keys: Order
    values: Order

    def unpack(self, pages: Array, head_dim: int) -> tuple[Array, Array]:
        """Return keys and values `[pages, Hkv, page_size, D]`.

        Args:
            pages: `[pages, Hkv, 2 * page_size * D]`, as they lie in the cache.
            head_dim: D.
        """
        half = self.keys.size
        shape = (*pages.shape[:2], half // head_dim, head_dim)
        keys, values = pages[..., :half], pages[..., half:]
        return keys[..., self.keys].reshape(shape), values[..., self.values].reshape(shape)

    def pack(self, keys: Array, values: Array) -> Array:
        """Return pages `[pages, Hkv, 2 * page_size * D]`; the inverse of `unpack`."""
        pages, heads = keys.shape[:2]
        half = self.keys.size
        packed = np.zeros((pages, heads, 2 * half), keys.dtype)
        packed[..., self.keys] = keys.reshape(pages, heads, half)
        packed[..., half + self.values] = values.reshape(pages, heads, half)
        return packed


@cache
def packing(isa: str, dtype: torch.dtype, kv_dtype: str, page_size: int, head_dim: int) -> Packing:
    """Return the order in which the writer of a code path stores a page.

    Args:
        isa: `amx`, `vec`, ...
        dtype: of the keys and values that are written.
        kv_dtype: vLLM's name of the cache dtype, `auto` or `fp8_e4m3`.
        page_size: rows of a page.
        head_dim: D.

    Raises:
        Unsupported: `P-PACKING` when the writer does not give each element one place.
    """
    half = page_size * head_dim
    code = torch.arange(half)
    stored = np.zeros(2 * half, np.int64)
    # One bit of the code at a time, as 0.0 or 1.0: that survives every dtype, FP8 included.
    for bit in range(max(1, (half - 1).bit_length())):
        rows = ((code >> bit) & 1).to(dtype).view(page_size, 1, head_dim)
        page = torch.zeros(1, 1, 2 * page_size, head_dim, dtype=storage_dtype(dtype, kv_dtype))
        keys, values = page.chunk(2, dim=2)
        operators().cpu_attn_reshape_and_cache(
            rows, rows, keys, values, torch.arange(page_size), isa, 1.0, 1.0, kv_dtype
        )
        words = page.view(-1).view(torch.uint8).numpy().reshape(2 * half, -1)
        stored |= words.any(axis=1).astype(np.int64) << bit
    orders = []
    for part in (stored[:half], stored[half:]):
        order = np.argsort(part)
        if not np.array_equal(part[order], np.arange(half)):
            raise Unsupported(
                f"the writer of vLLM's {isa} path does not give each element of a page of {page_size} x "
                f"{head_dim} {dtype} one place, so its cache cannot be read; record on another processor.",
                rule="P-PACKING",
                isa=isa,
            )
        orders.append(order)
    return Packing(*orders)


def storage_dtype(dtype: torch.dtype, kv_dtype: str) -> torch.dtype:
    """Return the dtype of the cache tensor."""
    return dtype if kv_dtype == "auto" else torch.uint8
