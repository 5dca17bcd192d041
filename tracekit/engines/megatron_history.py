"""What a trainer on Megatron does, told to the history of a recording: weights and gradients (docs/gate.md).

An optimizer step is taken from torch's hook on all optimizers. It cannot be read off the weights: a
distributed optimizer keeps parameters of its own and writes those of the model through `.data`, which neither
moves them nor counts as a change.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tracekit.engines.hooks import WeakHook
from tracekit.engines.megatron_step import Forward
from tracekit.engines.patch import Entry
from tracekit.engines.transformers_weights import Weights
from tracekit.recorder.history import Computed
from tracekit.recorder.observation import Handle
from tracekit.recorder.session import Session


class Followed:
    """Tells a session what happens to the weights and the gradients of one model, which it holds weakly.

    Args:
        session: of the recording.
        model: the language model.
        settle: called before an optimizer step is told, to end a pass that runs in a backward.
    """

    def __init__(self, session: Session, model: torch.nn.Module, settle: Callable[[], None]) -> None:
        self._session, self._model, self._settle = session, weakref.ref(model), settle
        self._weights = Weights(model)
        self._stepped = False
        self._retains = False

    def entries(self) -> list[Entry]:
        """The functions of torch that say whether a graph is kept."""
        names = ("backward", "grad")
        return [Entry(name, vars(torch.autograd), name, self._watch_graph) for name in names]

    def hooks(self) -> list[Callable[[], Any]]:
        """Registrations of hooks; each returns a handle."""
        return [partial(register_optimizer_step_post_hook, WeakHook(self._after_step))]

    def look(self) -> None:
        """Tell of weights that changed since the last forward other than by a step: a load, an edit."""
        changed = self._weights.changed()
        if changed and not self._stepped:
            self._session.new_weights()
        self._stepped = False

    def computed(self, layer: int, kernel: str) -> Callable[[], None]:
        """Return what tells that the gradients of a launch of the step that runs were computed."""
        step, session = self._session.current, self._session

        def computed() -> None:
            session.history.backward(step, layer, kernel, session.weights, retained=self._retains)

        return computed

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer of this model has stepped: newer weights, once for all optimizers of a step."""
        model = self._model()
        if model is None:
            return
        mine = set(_storages(_with_main(model.parameters())))
        theirs = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if mine.isdisjoint(_storages(theirs)):
            return
        self._settle()
        if not self._stepped:
            self._session.new_weights()
        self._stepped = True

    def _watch_graph(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature, reference = inspect.signature(original), weakref.ref(self)

        def watched(*args: Any, **kwargs: Any) -> Any:
            followed = reference()
            if followed is None:
                return original(*args, **kwargs)
            given = signature.bind_partial(*args, **kwargs).arguments
            outer, keeps = followed._retains, given.get("retain_graph")
            followed._retains = bool(given.get("create_graph") if keeps is None else keeps)
            try:
                return original(*args, **kwargs)
            finally:
                followed._retains = outer

        return watched


def spans(forward: Forward) -> Mapping[Handle, Computed]:
    """The rows of each request of a forward: all of them."""
    return {handle: Computed(0, forward.slots_of(index).size) for index, handle in enumerate(forward.handles)}


def _with_main(parameters: Iterator[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    """Parameters, and what Megatron's optimizers keep in FP32 in their place."""
    for parameter in parameters:
        yield parameter
        main = getattr(parameter, "main_param", None)
        if isinstance(main, torch.Tensor):
            yield main


def _storages(tensors: Any) -> Iterator[int]:
    """Where tensors lie: a shard of a parameter lies in the memory of the whole."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            yield tensor.untyped_storage().data_ptr()
