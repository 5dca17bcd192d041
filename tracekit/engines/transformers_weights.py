"""Whether the weights of a model were updated between two forwards, without reading them."""

from itertools import chain
from operator import attrgetter
from typing import Any

import torch

_version = attrgetter("_version")


class Weights:
    """Watches where the parameters of a model lie and how often torch changed them in place.

    An optimizer step, `copy_`, a load of a checkpoint and new tensors are all seen. What is written through
    `.data` or by a kernel of one's own leaves no mark in torch, and is not seen.

    The tree of modules is walked again only where a module has come, gone or been exchanged: that takes
    far longer than a look, which every forward pays.

    Args:
        model: a torch module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._walk()
        self._mark = self._look()

    def changed(self) -> bool:
        """Whether they changed since the last time that this was asked."""
        if _values(self._branches) != self._children:
            self._walk()
        before, self._mark = self._mark, self._look()
        return before != self._mark

    def _walk(self) -> None:
        modules = list(self._model.modules())
        self._branches = [module._modules for module in modules]
        self._children = _values(self._branches)
        self._leaves = [module._parameters for module in modules]

    def _look(self) -> list[int]:
        parameters = [p for p in _values(self._leaves) if p is not None]
        return [*map(torch.Tensor.data_ptr, parameters), *map(_version, parameters)]


def _values(tables: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))
