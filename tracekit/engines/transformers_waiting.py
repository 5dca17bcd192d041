"""Launches that wait for the end of their forward before anybody looks at them.

The weights of a layer leave nothing else in the processor's caches: looked at one by one, each launch would
pay for reading the recorder anew, which takes longer than the look. So only what the engine goes on with is
copied at once, Q and O. Keys, values and masks stay where they are until the forward has ended, and torch
counts how often they are written to.
"""

from typing import Any, NamedTuple

import torch

from tracekit.engines.torch_bits import Copied, own
from tracekit.engines.transformers_kernel import Arguments, Kernel, KernelCall, Layout
from tracekit.engines.transformers_step import Forward
from tracekit.errors import Unsupported
from tracekit.recorder.arena import Arena

FEW = 64 << 10
"""Bytes of Q up to which the keys and values of a launch are kept alive for it, where no cache does."""


class Copies(NamedTuple):
    """The tensors of a launch that the engine goes on with, as they were when it ran."""

    q: Copied
    out: Copied
    lse: Copied | None

    @classmethod
    def of(cls, call: KernelCall, arena: Arena) -> "Copies":
        """Copy them now."""
        return cls(
            own(call.q, arena), own(call.out, arena), None if call.lse is None else own(call.lse, arena)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        q, out, lse = self
        return q.memory.nbytes + out.memory.nbytes + (0 if lse is None else lse.memory.nbytes)


class Waiting(NamedTuple):
    """A launch whose Q and outputs are copies.

    Args:
        kernel: what ran.
        module: the attention module, and further arguments as those of `Arguments`.
        copies: of its Q and outputs; they say how Q lay.
        versions: how often torch had changed keys, values and mask in place when it ran.
    """

    kernel: Kernel
    module: Any
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    kwargs: dict[str, Any]
    copies: Copies
    versions: tuple[int, ...]

    @classmethod
    def of(cls, kernel: Kernel, call: KernelCall, arena: Arena) -> "Waiting":
        """Let a launch wait that `may_wait`: what the engine goes on with is copied now."""
        module, _, k, v, mask, kwargs, _, _ = call
        return cls(kernel, module, k, v, mask, kwargs, Copies.of(call, arena), _versions(k, v, mask))

    def checked(self) -> Arguments:
        """Return the arguments, which are still those of the launch.

        Raises:
            Unsupported: `T-WRITTEN` when they were written to since then.
        """
        _, module, k, v, mask, kwargs, (q, out, _), versions = self
        if _versions(k, v, mask) != versions:
            raise Unsupported(
                "its keys or values were written to between its launch and the end of its forward, or its "
                "mask was; the call is not kept. Let a cache write them before the attention function, as "
                "DynamicCache does.",
                rule="T-WRITTEN",
            )
        layout = Layout(q.dtype, q.shape, q.strides, "cpu", grad=False)  # as `may_wait` has seen to
        return Arguments(module, layout, k, v, mask, kwargs, out.dtype)


def may_wait(call: KernelCall, forward: Forward) -> bool:
    """Whether a launch may wait for the end of its forward.

    One may not: whose keys and values nobody else keeps alive, unless it is small; whose Q has strides that
    would not outlive a copy, or a gradient; and one of tensors that torch does not count writes to.
    """
    q, k, v = call.q, call.k, call.v
    if not forward.placed or forward.cache is None or q.requires_grad or not q.is_cpu or not k.is_cpu:
        return False
    if k.is_inference() or v.is_inference() or (call.mask is not None and call.mask.is_inference()):
        return False
    if not (q.is_contiguous() or q.transpose(1, 2).is_contiguous()):
        return False
    return q.nbytes <= FEW or _holds(forward.cache, call)


def _holds(cache: Any, call: KernelCall) -> bool:
    """Whether the keys and values of a launch are the cache's own tensors."""
    layers, index = getattr(cache, "layers", ()), call.module.layer_idx
    if not 0 <= index < len(layers):
        return False
    return getattr(layers[index], "keys", None) is call.k and getattr(layers[index], "values", None) is call.v


def _versions(k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> tuple[int, ...]:
    return (k._version, v._version) if mask is None else (k._version, v._version, mask._version)
