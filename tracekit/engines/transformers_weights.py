"""Whether the weights of a model were updated between two forwards, without reading them."""

import weakref
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

_version = attrgetter("_version")


class Weights:
    """Watches where the weights of a model lie, and how often torch changed them in place.

    Weights are its parameters and stored buffers. An optimizer step, `copy_`, a load of a checkpoint and new
    tensors are all seen. What is written through `.data` or by a kernel of one's own leaves no mark in torch,
    and is not seen here; `transformers_proof` reads the bytes.

    The tree of modules is walked again only where a module has come, gone or been exchanged: that takes
    far longer than a look, which every forward pays.

    Args:
        model: a torch module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._walk()
        self._mark = self._look()

    def changed(self) -> bool:
        """Whether they changed since the last time that this was asked."""
        if self._branches.values() != self._children:
            self._walk()
        before, self._mark = self._mark, self._look()
        return before != self._mark

    def same(self) -> bool:
        """Whether they are, as far as torch marks it, those of the last time that `changed` was asked."""
        return self._look() == self._mark

    def tensors(self) -> list[torch.Tensor]:
        """Return them as they are now; also while the model itself goes."""
        stored = [table.get(name) for table, name in self._stored]
        return [tensor for tensor in (*self._leaves.values(), *stored) if tensor is not None]

    def _walk(self) -> None:
        model = self._model()
        assert model is not None
        modules = list(model.modules())
        self._branches = _Tables([module._modules for module in modules])
        self._children = self._branches.values()
        self._leaves = _Tables([module._parameters for module in modules])
        self._stored = [
            (module._buffers, name)
            for module in modules
            for name in module._buffers.keys() - module._non_persistent_buffers_set
        ]

    def _look(self) -> list[int]:
        tensors = self.tensors()
        places = list(map(torch.Tensor.data_ptr, tensors))
        try:
            return [*places, *map(_version, tensors)]
        except RuntimeError:  # torch does not count what happens to tensors of inference mode
            return [*places, *(-1 if tensor.is_inference() else tensor._version for tensor in tensors)]


class _Tables:
    """The tables of all modules of one kind. Most are empty and stay so, which is faster to ask."""

    def __init__(self, tables: list[dict[str, Any]]) -> None:
        self._all = tables
        self._full = [table for table in tables if table]
        self._empty = [table for table in tables if not table]

    def values(self) -> list[Any]:
        """Return what is in them."""
        tables = self._all if any(self._empty) else self._full
        return list(chain.from_iterable(map(dict.values, tables)))
