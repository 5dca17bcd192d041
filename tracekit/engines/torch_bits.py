"""torch tensors as a recording takes them: borrowed, or some rows copied."""

from typing import NamedTuple

import numpy as np
import torch

from tracekit.model import Array, Bits, DType
from tracekit.providers.torch_tensors import from_torch
from tracekit.recorder.arena import Arena
from tracekit.recorder.observation import Borrowed


def borrow(tensor: torch.Tensor, name: str) -> Borrowed:
    """Return the bits of a tensor without a copy where it lies in host memory.

    Raises:
        Unsupported: `T-DTYPE` for a dtype that a trace cannot hold.
    """
    return Borrowed(*from_torch(tensor, name))


def copied(tensor: torch.Tensor, name: str) -> Bits:
    """Return the bits of a tensor in host memory that nobody else writes to.

    Raises:
        Unsupported: `T-DTYPE`.
    """
    borrowed = borrow(tensor.detach().cpu(), name)
    return Bits(borrowed.data.copy(), borrowed.dtype)


def widened(tensor: torch.Tensor, name: str) -> Bits:
    """Return a copy in FP32: exact for every dtype that a model keeps its sinks or their gradients in.

    Raises:
        Unsupported: `T-DTYPE`.
    """
    bits = copied(tensor, name)
    return bits if bits.dtype is DType.FLOAT32 else Bits.from_float32(bits.to_float32(), DType.FLOAT32)


class Copied(NamedTuple):
    """A copy of a tensor in host memory, and how its elements lie there."""

    memory: Array
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """Return it as a tensor, without a further copy."""
        return torch.frombuffer(self.memory, dtype=self.dtype).as_strided(self.shape, self.strides)


def own(tensor: torch.Tensor, arena: Arena) -> Copied:
    """Return a copy in host memory that nobody else writes to, with the same strides where they are dense."""
    if not tensor.is_cpu or not (tensor.is_contiguous() or _dense(tensor)):
        tensor = tensor.detach().cpu().contiguous()
    memory = arena.copy(tensor.data_ptr(), tensor.nbytes)
    return Copied(memory, tensor.dtype, tensor.shape, tensor.stride())


def _dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in memory without gaps, in any order of its axes."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in axes) == tensor.numel()


def torch_kind(dtype: torch.dtype) -> str:
    """Return the name of a dtype, `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def take_rows(tensor: torch.Tensor, slots: Array, name: str) -> Bits:
    """Return an owned copy of some rows of `[B, S, ...]`, addressed by the slot `b * S + s`."""
    borrowed = borrow(tensor, name)
    b, s = np.divmod(slots, borrowed.data.shape[1])
    return Bits(borrowed.data[b, s], borrowed.dtype)
