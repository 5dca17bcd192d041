"""Sliding windows: which rows of a request are alive in a layer that gives old pages away.

A row at position p reads `(p - w, p]`. A launch of the last m of n tokens asks from position n - m on, so it
can read rows `[n - m - w + 1, n)` and nothing before. What the block table says about older rows is another
row's memory by now: vLLM reuses the blocks (`[1, 2, 1, 5, 1, 2, ...]` for one request), and those rows are
never gathered, recorded or compared.
"""

import numpy as np

from tracekit.canonical.refuse import integers, refuse
from tracekit.model import Array, Ranges


def live_rows(length: int, new: int, window: int | None) -> tuple[int, int]:
    """Return `(first, end)`, the rows that a launch may read of one request.

    Args:
        length: n, the sequence length with this launch's tokens.
        new: m, query rows of this launch, the last ones.
        window: w, a row's own position included; None without a window.

    Raises:
        InvalidCall: `C-WINDOW` when these are no lengths.
    """
    if not 0 <= new <= length or (window is not None and window < 1):
        refuse(
            "C-WINDOW",
            f"{new} new of {length} tokens under a window of {window}.",
            length=length,
            new=new,
            window=window,
        )
    return (0 if window is None else max(0, length - new - window + 1)), length


def window_from_left(left: int) -> int | None:
    """Return w from the number of rows before its own that a row reads; below 0 there is no window.

    FlashAttention's `window_size=(left, right)` and SGLang's `sliding_window_size` count without the row
    itself, the checkpoint's `sliding_window` and vLLM's `impl.sliding_window` count with it; one row more or
    less is no error message anywhere, so the two are never mixed silently.
    """
    return None if left < 0 else left + 1


def window_ranges(positions: Array, window: int | None) -> Ranges:
    """Return what causal rows read under a window: `[max(0, p - w + 1), p + 1)`.

    Args:
        positions: `[T]`, absolute.
        window: w, or None.
    """
    at = integers(positions, "positions")
    return Ranges(np.zeros_like(at) if window is None else np.maximum(0, at - window + 1), at + 1)
