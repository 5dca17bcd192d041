"""Torch operators as steps of a host graph: operator, aliases of its tensors, scalars by value."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tracekit.errors import ProviderFailed


@contextmanager
def recorded(steps: list[Callable[[], None]]) -> Iterator[None]:
    """Append every operator of a block to `steps`.

    Raises:
        ProviderFailed: `P-GRAPH`, the block reads a result.
    """
    with _Recorder(steps):
        yield


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, steps: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps = steps

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads(function, args):
            raise ProviderFailed(
                f"{function} reads a result while a graph is captured; a device would have to be waited for.",
                rule="P-GRAPH",
            )
        kwargs = kwargs or {}
        # One that returns tensors is run at capture, for their shapes; one that only writes is not.
        result = function(*args, **kwargs) if function._schema.returns else None
        self.steps.append(_Step(function, args, kwargs, result))
        return result


class _Step:
    """One operator. What it returns goes to where its result lay at capture, as on a device."""

    def __init__(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.function = function
        self.args, self.kwargs = tree_map(_alias, args), tree_map(_alias, kwargs)
        self.results = [_alias(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    def __call__(self) -> None:
        with torch.no_grad():
            answer = self.function(*self.args, **self.kwargs)
            leaves = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
            for held, leaf in zip(self.results, leaves, strict=True):
                if held.data_ptr() != leaf.data_ptr():
                    held.copy_(leaf)


def _reads(function: Any, args: Any) -> bool:
    """Whether the host reads the result of an operator, or its size: a device would have to be waited for."""
    if torch.Tag.data_dependent_output in function.tags:
        return True
    if function is torch.ops.aten.index.Tensor:  # its size depends on numbers only where it is given a mask
        return any(leaf.dtype is torch.bool for leaf in tree_leaves(args[1]) if leaf is not None)
    return torch.Tag.dynamic_output_shape in function.tags


def _alias(value: Any) -> Any:
    """A tensor as it lies now, whatever its owner binds it to or resizes it to later."""
    return value.detach() if isinstance(value, torch.Tensor) else value
