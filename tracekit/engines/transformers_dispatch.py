"""The rows of transformers' dispatch table while models are recorded: the model's own function still runs."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tracekit.engines import transformers_backend
from tracekit.engines.transformers_kernel import TKA1, Kernel, KernelCall
from tracekit.engines.transformers_points import Attention, own_eager


class Looker(Protocol):
    """What looks at the calls of one model. The table holds it weakly: it ends with its model."""

    def looks(self, module: Any) -> bool:
        """Whether the call of a module is to be recorded; one that is filtered out is counted."""
        ...

    def take(self, kernel: Kernel, call: KernelCall) -> None:
        """Record a call that has just run, or let it wait. Nothing that happens here reaches the engine."""
        ...


def wrap(recorder: Looker, kernel: Kernel, original: Attention | None) -> Attention:
    """Stand before a function of the dispatch table; the model's own function is what runs."""
    reference = weakref.ref(recorder)

    def recorded(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        function = own_eager(module) if original is None else original
        recorder = reference()
        if recorder is None or not recorder.looks(module):
            return function(module, query, key, value, attention_mask, **kwargs)
        result = function(module, query, key, value, attention_mask, **kwargs)
        recorder.take(kernel, KernelCall(module, query, key, value, attention_mask, kwargs, result[0]))
        return result

    return recorded


def wrap_tka1(recorder: Looker, original: Attention) -> Attention:
    """Stand before TKA-1, which gives the LSE too."""
    reference = weakref.ref(recorder)

    def recorded(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        recorder = reference()
        if recorder is None or not recorder.looks(module):
            return original(module, query, key, value, attention_mask, **kwargs)
        # The same computation; transformers has no place for the LSE, a trace has.
        out, lse = transformers_backend.attend(module, query, key, value, attention_mask, **kwargs)
        recorder.take(TKA1, KernelCall(module, query, key, value, attention_mask, kwargs, out, lse))
        return out, None

    return recorded


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
