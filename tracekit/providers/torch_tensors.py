"""torch tensors as bit patterns and back."""

import numpy as np
import torch

from tracekit.errors import Unsupported
from tracekit.model import Array, Bits, DType

_DTYPES = {
    torch.bfloat16: (DType.BFLOAT16, torch.uint16),
    torch.float16: (DType.FLOAT16, torch.uint16),
    torch.float32: (DType.FLOAT32, torch.uint32),
}
_TORCH = {dtype: kind for kind, (dtype, _) in _DTYPES.items()}


def from_torch(tensor: torch.Tensor, name: str) -> tuple[Array, DType]:
    """Return the bits of a tensor, without a copy where it lies in host memory; any strides.

    Raises:
        Unsupported: `T-DTYPE` for a dtype that a trace cannot hold.
    """
    dtype = logical_dtype(tensor, name)
    held = tensor if tensor.is_cpu and not tensor.requires_grad else tensor.detach().cpu()
    array: Array = held.view(_DTYPES[tensor.dtype][1]).numpy()
    return array, dtype


def logical_dtype(tensor: torch.Tensor, name: str) -> DType:
    """Return what the elements of a tensor are.

    Raises:
        Unsupported: `T-DTYPE` for a dtype that a trace cannot hold.
    """
    if tensor.dtype not in _DTYPES:
        raise Unsupported(
            f"{name} is {tensor.dtype}; attention is recorded in bfloat16, float16 or float32.",
            rule="T-DTYPE",
            tensor=name,
            dtype=str(tensor.dtype),
        )
    return _DTYPES[tensor.dtype][0]


def to_torch(bits: Bits) -> torch.Tensor:
    """Return the tensor with these bits; a copy."""
    words = np.dtype(f"i{bits.data.itemsize}")
    return torch.from_numpy(bits.data.view(words).copy()).view(_TORCH[bits.dtype])


def over(words: Array, dtype: DType) -> torch.Tensor:
    """Return the tensor that lies over an array of bit patterns; no copy."""
    return torch.from_numpy(words.view(np.dtype(f"i{words.itemsize}"))).view(_TORCH[dtype])


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the torch dtype of a logical dtype."""
    return _TORCH[dtype]
