"""Whether the forwards of a recording ran under the weights that its history says.

torch marks what is changed in place and what is replaced: looked at before each forward, this says when an
update came. What is written through `.data`, or by a kernel of one's own, leaves no such mark. So the bytes
are read too, twice for each state of the weights that more than one forward ran under: at the first of these
forwards, and when the recording ends or an optimizer is about to step. Other bytes there, or none, are a
doubt. What was written and written back between the two is not seen.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tracekit.engines.transformers_weights import Weights

Tell = Callable[[str], None]
_UPDATED = "they were updated before their bytes could be read again"
_WRITTEN = "they were written through .data or a kernel of one's own"


class ProvenWeights:
    """The weights of a model, from one forward to the next. It does not hold the model itself.

    Args:
        model: a torch module.
        doubt: told in words what is not proven of the weights; once for each state of them.
    """

    def __init__(self, model: torch.nn.Module, doubt: Tell) -> None:
        self._doubt = doubt
        self._weights = Weights(model)
        self._bytes = b""
        self._steps: list[int] = []
        """The forwards under these weights since their bytes were last read."""

    def changed(self, step: int) -> bool:
        """Whether they were updated since the last forward, as far as torch has marked it; asked before each.

        Args:
            step: number of the forward that is about to run.
        """
        updated = self._weights.changed()
        if updated and len(self._steps) > 1:
            self._say(_UPDATED)
        if updated or not self._steps:
            self._steps = []
            self._bytes = self._read()
        self._steps.append(step)
        return updated

    def settle(self) -> None:
        """Prove that the forwards so far ran under the same weights, or tell that it cannot be proven."""
        if len(self._steps) < 2:
            return
        try:
            if not self._weights.same():
                self._say(_UPDATED)
            elif self._bytes:
                before, self._bytes = self._bytes, self._read()
                if self._bytes and self._bytes != before:
                    self._say(_WRITTEN)
        except Exception as error:
            self._doubt(f"the weights cannot be looked at: {error!r:.200}")
        self._steps = self._steps[-1:]

    def _say(self, what: str) -> None:
        first, last = self._steps[0], self._steps[-1]
        self._doubt(f"steps {first} to {last} may have run under different weights: {what}")

    def _read(self) -> bytes:
        """A digest of all bytes; empty where they cannot be read, which is told."""
        digest = xxhash.xxh3_128()
        try:
            for tensor in {id(tensor): tensor for tensor in self._weights.tensors()}.values():
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                if flat.numel():
                    digest.update(flat.view(torch.uint8).numpy().data)
        except Exception as error:
            self._doubt(f"the bytes of the weights cannot be read: {error!r:.200}")
            return b""
        return digest.digest()


def settled_before_updates(weights: ProvenWeights) -> Any:
    """Have weights settled before any optimizer steps, as long as they are watched; return torch's handle."""
    reference = weakref.ref(weights)

    def settle(*_: Any) -> None:
        watched = reference()
        if watched is not None:
            watched.settle()

    return register_optimizer_step_pre_hook(settle)
