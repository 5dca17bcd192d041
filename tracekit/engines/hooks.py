"""Hooks of torch modules that neither go along with a copy of their module nor keep anything alive."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

GONE = (
    "the hooks of the model were taken away while it was recorded; what it ran afterwards is not recorded. "
    "Remove hooks of your own by the handles that torch gave for them."
)


class Hook:
    """A hook of a model's module. A copy of the model, in this process or pickled, is not recorded.

    Args:
        method: called with what torch gives.
    """

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the method."""
        self._method(*args, **kwargs)

    def __deepcopy__(self, _: Any) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_nothing, ()


class WeakHook(Hook):
    """A hook that does not hold its recorder, for the modules that the recorder holds."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._reference = weakref.WeakMethod(method)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the method, where the model is not being compiled."""
        if torch.compiler.is_compiling():
            return
        method = self._reference()
        if method is not None:
            method(*args, **kwargs)


def nothing(*_: Any, **__: Any) -> None:
    """What stands in a copy for a hook."""


def _get_nothing() -> Callable[..., None]:
    return nothing
