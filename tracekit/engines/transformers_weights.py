"""Whether the weights of a model were updated between two forwards, without reading them."""

from collections.abc import Iterator
from typing import Any


class Weights:
    """Watches where the parameters of a model lie and how often torch changed them in place.

    An optimizer step, `copy_`, a load of a checkpoint and new tensors are all seen. What is written through
    `.data` or by a kernel of one's own leaves no mark in torch, and is not seen.

    Args:
        model: a torch module.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._mark = self._look()

    def changed(self) -> bool:
        """Whether they changed since the last time that this was asked."""
        before, self._mark = self._mark, self._look()
        return before != self._mark

    def _look(self) -> int:
        return hash(tuple((p.data_ptr(), p._version) for p in self._parameters()))

    def _parameters(self) -> Iterator[Any]:
        """Every parameter; `Module.parameters` makes their names too, which takes ten times as long."""
        modules = [self._model]
        while modules:
            module = modules.pop()
            yield from filter(_is_there, module._parameters.values())
            modules.extend(filter(_is_there, module._modules.values()))


def _is_there(part: Any) -> bool:
    return part is not None
