"""An attention function of transformers as the recorder knows it, and what a call of it says."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tracekit.engines.transformers_backend import IDENTITY
from tracekit.model import ExecutedIdentity
from tracekit.providers.transformers_identity import executed


@dataclass(frozen=True)
class Kernel:
    """An attention function as the recorder knows it.

    Args:
        name: `sdpa`, `eager` or `tracekit`: the name in transformers' table.
        own_scores: whether scores are held in the dtype of q (else in FP32).
        own_probabilities: whether P meets V in the dtype of q (else in FP32).
        portable: whether it is TKA-1, whose bits depend on nothing here.
    """

    name: str
    own_scores: bool
    own_probabilities: bool
    portable: bool = False

    def identity(self, device: str) -> ExecutedIdentity:
        """What ran, when this kernel ran here."""
        return IDENTITY if self.portable else executed(f"transformers.{self.name}", device)


SDPA = Kernel("sdpa", own_scores=False, own_probabilities=True)
"""torch's fused CPU kernel keeps scores in FP32 and casts P to the dtype of V for the second product."""
EAGER = Kernel("eager", own_scores=True, own_probabilities=True)
"""q @ k is a tensor of the model's dtype, and so is P before it meets V."""


TKA1 = Kernel("tracekit", own_scores=False, own_probabilities=False, portable=True)
"""TKA-1, served by `transformers_backend`."""


class Layout(NamedTuple):
    """How a tensor lies: what a description says of Q besides its bits.

    Args:
        dtype: of its elements.
        shape: `[B, H, S, D]`.
        strides: in elements.
        device: `cpu`, `cuda`.
        grad: whether it has a gradient.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    grad: bool


class Arguments(NamedTuple):
    """A call of an attention function without the bits of Q and O.

    Args:
        module: the attention module.
        q: how it lies.
        k: `[B, Hkv, T, D]`.
        v: `[B, Hkv, T, Dv]`.
        mask: as passed.
        kwargs: as passed.
        out: dtype of O.
    """

    module: Any
    q: Layout
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    kwargs: dict[str, Any]
    out: torch.dtype


class KernelCall(NamedTuple):
    """The arguments and the answer of one attention function call.

    Args:
        module: the attention module.
        q: `[B, H, S, D]`.
        k: `[B, Hkv, T, D]`.
        v: `[B, Hkv, T, Dv]`.
        mask: as passed.
        kwargs: as passed.
        out: `[B, S, H, Dv]`.
        lse: `[B, S, H]` FP32 where the kernel gave one.
    """

    module: Any
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    kwargs: dict[str, Any]
    out: torch.Tensor
    lse: torch.Tensor | None = None

    def arguments(self) -> Arguments:
        """Return what does not hold Q and O alive."""
        q = self.q
        layout = Layout(q.dtype, q.shape, q.stride(), q.device.type, q.requires_grad)
        return Arguments(self.module, layout, self.k, self.v, self.mask, self.kwargs, self.out.dtype)
