"""torch tensors as a recording takes them: borrowed, or some rows copied."""

import numpy as np
import torch

from tracekit.model import Array, Bits
from tracekit.providers.torch_tensors import from_torch
from tracekit.recorder.observation import Borrowed


def borrow(tensor: torch.Tensor, name: str) -> Borrowed:
    """Return the bits of a tensor without a copy where it lies in host memory.

    Raises:
        Unsupported: `T-DTYPE` for a dtype that a trace cannot hold.
    """
    return Borrowed(*from_torch(tensor, name))


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory that nobody else writes to, with the same strides where they are dense."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def torch_kind(dtype: torch.dtype) -> str:
    """Return the name of a dtype, `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def take_rows(tensor: torch.Tensor, slots: Array, name: str) -> Bits:
    """Return an owned copy of some rows of `[B, S, ...]`, addressed by the slot `b * S + s`."""
    borrowed = borrow(tensor, name)
    b, s = np.divmod(slots, borrowed.data.shape[1])
    return Bits(borrowed.data[b, s], borrowed.dtype)
