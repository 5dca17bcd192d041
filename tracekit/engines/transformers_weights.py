"""Whether the forwards of a recording ran under the weights that its history says.

torch counts what is changed in place and moves what is replaced: looked at before each forward, this says
when an update came. What is written through `.data`, or by a kernel of one's own, leaves no such mark. So the
bytes are read too, twice for each state of the weights that more than one forward ran under: at the first of
these forwards, and when the recording ends or an optimizer is about to step. Other bytes there, or none, are
a doubt. What was written and written back between the two is not seen.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_pre_hook

Tell = Callable[[str], None]
_OWN = ".data or a kernel of one's own"


class Weights:
    """The parameters and stored buffers of a model, from one forward to the next.

    It holds the tensors but not their model, so that the model's end can still be judged.

    Args:
        model: a torch module.
        doubt: told in words what is not proven of the weights; once for each state of them.
    """

    def __init__(self, model: Any, doubt: Tell) -> None:
        self._doubt = doubt
        self._tensors = list(_tensors(model))
        self._mark = self._look()
        self._bytes = b""
        self._steps: list[int] = []
        """The forwards under these weights since their bytes were last read."""

    def changed(self, model: Any, step: int) -> bool:
        """Whether they were updated since the last forward, as far as torch has marked it; asked before each.

        Args:
            model: the module, whose tensors may be others by now.
            step: number of the forward that is about to run.
        """
        before = self._mark
        self._tensors = list(_tensors(model))
        self._mark = self._look()
        updated = before != self._mark
        if updated and len(self._steps) > 1:
            self._say("they were updated before their bytes could be read again")
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
            self._settle()
        except Exception as error:
            self._doubt(f"the weights cannot be looked at: {error!r:.200}")

    def _settle(self) -> None:
        if self._look() != self._mark:
            self._say("they were updated before their bytes could be read again")
        elif self._bytes and self._bytes != (now := self._read()):
            self._say(f"they were written through {_OWN}" if now else "")
            self._bytes = now
        self._steps = self._steps[-1:]

    def _say(self, what: str) -> None:
        if what:
            first, last = self._steps[0], self._steps[-1]
            self._doubt(f"steps {first} to {last} may have run under different weights: {what}")

    def _look(self) -> int:
        return hash(tuple((tensor.data_ptr(), _version(tensor)) for tensor in self._tensors))

    def _read(self) -> bytes:
        """A digest of all bytes; empty where they cannot be read, which is told."""
        digest = xxhash.xxh3_128()
        try:
            for tensor in {id(tensor): tensor for tensor in self._tensors}.values():
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
        except Exception as error:
            self._doubt(f"the bytes of the weights cannot be read: {error!r:.200}")
            return b""
        return digest.digest()


def settled_before_updates(weights: Weights) -> Any:
    """Have weights settled before any optimizer steps, as long as they are watched; return torch's handle."""
    reference = weakref.ref(weights)

    def settle(*_: Any) -> None:
        watched = reference()
        if watched is not None:
            watched.settle()

    return register_optimizer_step_pre_hook(settle)


def _version(tensor: Any) -> int:
    """How often it was changed in place; torch does not count tensors of inference mode."""
    return -1 if tensor.is_inference() else int(tensor._version)


def _tensors(model: Any) -> Iterator[Any]:
    """Every weight; `Module.parameters` makes their names too, which takes ten times as long."""
    modules = [model]
    while modules:
        module = modules.pop()
        yield from filter(_is_there, module._parameters.values())
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer
        modules.extend(filter(_is_there, module._modules.values()))


def _is_there(part: Any) -> bool:
    return part is not None
