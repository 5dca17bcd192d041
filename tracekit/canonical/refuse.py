"""How the canonicaliser refuses: one line a check, always with a rule code and the facts."""

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall
from tracekit.model import Array

Int64 = npt.NDArray[np.int64]


def refuse(rule: str, message: str, **facts: Any) -> NoReturn:
    """Raise `InvalidCall` with a rule code.

    Raises:
        InvalidCall: always.
    """
    raise InvalidCall(message, rule=rule, **facts)


def need_patterns(array: Array, name: str) -> Array:
    """Return the array if it holds bit patterns.

    A float array would be gathered as well, but a NaN payload or the sign of a zero may already be lost.

    Raises:
        InvalidCall: `C-BITS` when it does not hold unsigned integers.
    """
    if array.dtype.kind != "u":
        refuse(
            "C-BITS", f"{name} holds {array.dtype}; pass the bit patterns as unsigned integers.", name=name
        )
    return array


def integers(values: npt.ArrayLike, name: str, ndim: int = 1) -> Int64:
    """Return metadata of an engine (tables, lengths, positions) as int64 of a known rank.

    Raises:
        InvalidCall: `C-INTEGERS` when the values are no integers of that rank.
    """
    array = np.asarray(values)
    if (array.dtype.kind not in "iu" and array.size) or array.ndim != ndim:
        refuse(
            "C-INTEGERS",
            f"{name} is an integer array of {ndim} axes, not {array.dtype} {list(array.shape)}.",
            name=name,
        )
    return array.astype(np.int64)


def first_true(mask: npt.NDArray[np.bool_]) -> int | None:
    """Return the index of the first True in a flat mask, or None."""
    return int(np.argmax(mask)) if mask.any() else None
