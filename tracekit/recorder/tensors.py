"""Arrays of a user as bit patterns: numpy arrays, torch tensors and `Bits`, without importing torch."""

import sys
from typing import Any

import numpy as np

from tracekit.errors import InvalidCall
from tracekit.model import Bits, DType

_FROM_NUMPY = {"float16": DType.FLOAT16, "float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16}


def as_bits(value: Any, name: str) -> Bits:
    """Return the bits of `Bits`, a numpy float array or a torch tensor; a copy that tracekit owns.

    Args:
        value: bfloat16, float16 or float32.
        name: what it is, for the message.

    Raises:
        InvalidCall: `R-TENSOR` for any other kind or dtype.
    """
    if isinstance(value, Bits):
        return Bits(value.data.copy(), value.dtype)
    if hasattr(value, "detach"):
        torch = sys.modules["torch"]
        kind = str(value.dtype).removeprefix("torch.")
        if kind in _FROM_NUMPY:
            words = torch.int32 if kind == "float32" else torch.int16
            array = value.detach().cpu().contiguous().view(words).numpy().copy()
            return Bits(array.view(f"u{array.itemsize}"), _FROM_NUMPY[kind])
        raise _refused(name, kind)
    array = np.array(value, copy=True, order="C")
    kind = array.dtype.name
    if kind not in _FROM_NUMPY:
        raise _refused(name, kind)
    return Bits(array.view(f"u{array.itemsize}"), _FROM_NUMPY[kind])


def _refused(name: str, kind: str) -> InvalidCall:
    return InvalidCall(
        f"{name} is {kind}; pass bfloat16, float16 or float32 (a torch tensor, a numpy array or Bits).",
        rule="R-TENSOR",
        name=name,
        dtype=kind,
    )
