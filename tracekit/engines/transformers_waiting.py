"""Launches of few rows, which wait for the end of their forward before anybody looks at them.

A decode step has one small launch a layer, and the weights of a layer leave nothing else in the processor's
caches: looked at one by one, each launch would pay for reading the recorder anew, which takes longer than the
look. So only what the engine goes on with is copied at once, Q and O. Keys and values stay in the cache of
the model until the forward has ended, and torch counts how often they are written to.
"""

from typing import NamedTuple

from tracekit.engines.transformers_common import Kernel, KernelCall
from tracekit.engines.transformers_step import Forward
from tracekit.errors import Unsupported

FEW = 64 << 10
"""Bytes of Q up to which a copy is cheaper than a look."""


class Waiting(NamedTuple):
    """A launch whose Q and outputs are copies.

    Args:
        kernel: what ran.
        call: its arguments and answer.
        versions: how often torch had changed keys and values in place when it ran.
    """

    kernel: Kernel
    call: KernelCall
    versions: tuple[int, int]

    def checked(self) -> KernelCall:
        """Return the call, whose keys and values are still those of the launch.

        Raises:
            Unsupported: `T-WRITTEN` when they were written to since then.
        """
        if (self.call.k._version, self.call.v._version) != self.versions:
            raise Unsupported(
                "its keys or values were written to between its launch and the end of its forward; the "
                "call is not kept. Let a cache write them before the attention function, as DynamicCache "
                "does.",
                rule="T-WRITTEN",
            )
        return self.call


def waiting(kernel: Kernel, call: KernelCall, forward: Forward | None) -> Waiting | None:
    """Return a launch that may wait; None for one that has to be looked at now.

    That is: one of many rows, one whose keys and values no cache keeps alive, one in whose Q the strides
    would not outlive a copy or which has a gradient, and one of tensors that torch does not count writes to.
    """
    q, out = call.q, call.out
    if forward is None or not forward.placed or q.nbytes > FEW or q.requires_grad or not q.is_contiguous():
        return None
    if forward.cache is None or call.k.is_inference() or call.v.is_inference():
        return None
    lse = None if call.lse is None else call.lse.clone()
    return Waiting(
        kernel,
        call._replace(q=q.clone(), out=out.detach().clone(), lse=lse),
        (call.k._version, call.v._version),
    )
