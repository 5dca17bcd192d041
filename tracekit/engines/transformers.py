"""Engine transformers: records any model that dispatches through its attention interface, unchanged.

The functions that the model is set to run stay the ones that run: the recorder stands in the dispatch
table in their place, calls the original with the original arguments, and looks at what went in and out.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface

from tracekit.engines import transformers_backend
from tracekit.engines.patch import Entry, enter_all
from tracekit.engines.transformers_call import capture_call, check_cache
from tracekit.engines.transformers_common import EAGER, SDPA, TKA1, Kernel, KernelCall
from tracekit.engines.transformers_families import ratio_family
from tracekit.engines.transformers_identity import model_identity
from tracekit.engines.transformers_indexer import Watch, describe, indexer_of, observe_indexer
from tracekit.engines.transformers_reorder import Reorders
from tracekit.engines.transformers_step import (
    Forward,
    Sequences,
    cache_of,
    new_tokens,
    read_forward,
)
from tracekit.engines.transformers_waiting import Waiting, waiting
from tracekit.engines.transformers_weights import Weights
from tracekit.errors import TracekitError, Unsupported
from tracekit.model import Mode
from tracekit.recorder.history import Computed
from tracekit.recorder.session import Session

LATER = {"glm_moe_dsa": "its sparse indexer"}
"""Model types whose calls a plain record would get wrong, and why."""

Attention = Callable[..., tuple[torch.Tensor, Any]]


@contextmanager
def attach(session: Session, *, model: Any, weights_digest: bool = True) -> Iterator[None]:
    """Record the attention calls of a model until the context is left.

    Args:
        session: gets the calls.
        model: a transformers model; it keeps its attention implementation.
        weights_digest: whether to hash the weights for the identity of the trace.

    Raises:
        Unsupported: `T-MODEL`, `T-RATIO`, `T-IMPLEMENTATION` before anything is touched.
    """
    _refuse_model(model)
    if weights_digest:
        session.identity = model_identity(model)
    recorder = Recorder(session, model)
    with ExitStack() as stack:
        enter_all(stack, recorder.entries(), recorder.hooks())
        yield


class Recorder:
    """The hooks of one model."""

    def __init__(self, session: Session, model: Any) -> None:
        self._session = session
        self._model = model
        self._modules = attention_modules(model)
        session.names.update({layer: name for name, layer in _names(model, self._modules).items()})
        self._sequences = Sequences(session)
        self._weights = Weights(model)
        self._reorders = Reorders()
        self._signature = inspect.signature(type(model).forward)
        self._forward: Forward | None = None
        self._refused: dict[Any, TracekitError] = {}
        self._layers = {
            indexer: int(module.layer_idx)
            for module in self._modules
            if (indexer := indexer_of(module)) is not None
        }
        self._sparse = frozenset(self._layers.values())
        self._watches: dict[Any, tuple[Watch, ExitStack]] = {}
        self._indexed: set[int] = set()
        self._waiting: list[Waiting] = []

    def entries(self) -> list[Entry]:
        """The rows of transformers' dispatch table that are wrapped."""
        table = AttentionInterface._global_mapping
        entries = [
            Entry("transformers sdpa", table, "sdpa", lambda original: self._wrap(SDPA, original)),
            Entry("transformers eager", table, "eager", lambda original: self._wrap(EAGER, original)),
        ]
        if transformers_backend.NAME in table:
            entries.append(Entry("tracekit on TKA-1", table, transformers_backend.NAME, self._wrap_tka1))
        return entries

    def hooks(self) -> list[Callable[[], Any]]:
        """Registrations of module hooks; each returns a handle."""
        model = self._model
        hooks: list[Callable[[], Any]] = [
            lambda: model.register_forward_pre_hook(self.before_forward, with_kwargs=True),
            lambda: model.register_forward_hook(self.after_forward, always_call=True),
        ]
        if self._modules:
            first = min(self._modules, key=lambda module: self._modules[module])
            hooks.append(partial(first.register_forward_pre_hook, self._before_attention, with_kwargs=True))
        for indexer in self._layers:
            hooks.append(partial(indexer.register_forward_pre_hook, self._before_indexer))
            hooks.append(partial(indexer.register_forward_hook, self._after_indexer, always_call=True))
        return hooks

    def before_forward(self, _: Any, args: Any, kwargs: Any) -> None:
        """Begin a step: read which tokens the forward is about."""
        self._look_at_waiting()
        self._forward, self._refused = None, {}
        self._indexed.clear()
        expected = len(self._modules)
        try:
            forward = read_forward(self._signature, (self._model, *args), kwargs, self._sequences)
            training = self._model.training and torch.is_grad_enabled()
            fresh = new_tokens(forward, self._session)
            if self._session.skips_steps and self._reorders.moved(forward.cache):
                self._session.lose_kv(forward.handles)
            if self._weights.changed():
                self._session.new_weights()
            held = {handle: len(self._session.requests[handle].tokens) for handle in fresh}
            self._session.begin(
                fresh,
                expected=expected,
                mode=Mode.TRAINING if training else None,
                spans={h: Computed(held[h], held[h] + len(new)) for h, new in fresh.items()},
            )
            forward.implementation = str(self._model.config._attn_implementation)
            self._forward = forward
            if forward.cache is not None:
                self._place(forward.cache, forward)
        except Exception as error:
            self._session.begin({}, expected=expected)
            self._session.fail(error, "forward", fired=False)

    def after_forward(self, _: Any, __: Any, result: Any) -> None:
        """End the step."""
        self._look_at_waiting()
        if self._session.skips_steps and self._forward is not None:
            self._reorders.remember(self._forward.cache)
        self._forward = None
        self._session.end(failed=result is None)

    def _before_attention(self, module: Any, _: Any, kwargs: Any) -> None:
        """See a cache that the model has made itself, before the first layer writes to it."""
        if self._forward is not None and not self._forward.placed:
            cache = cache_of(kwargs)
            self._sequences.bind(cache, self._forward.handles)
            self._place(cache, self._forward)

    def _place(self, cache: Any, forward: Forward) -> None:
        """Find out for every layer where its rows will stand, before any layer writes."""
        forward.placed = True
        for module, layer in self._modules.items():
            try:
                check_cache(layer, cache, forward)
            except TracekitError as error:
                self._refused[module] = error

    def _before_indexer(self, module: Any, _: Any) -> None:
        layer = self._layers[module]
        if self._forward is None or not self._session.wants(layer):
            return
        try:
            watch = Watch(describe(module).weight)
        except Exception as error:
            self._indexed.add(layer)
            self._session.fail(error, f"indexer of layer {layer}", fired=False)
            return
        stack = ExitStack()
        stack.enter_context(watch)
        self._watches[module] = watch, stack

    def _after_indexer(self, module: Any, _: Any, result: Any) -> None:
        if module not in self._watches:
            return
        watch, stack = self._watches.pop(module)
        stack.close()
        layer = self._layers[module]
        self._indexed.add(layer)
        if result is None or self._forward is None:
            return
        try:
            self._session.observe_indexer(observe_indexer(module, layer, watch, self._forward))
        except Exception as error:
            self._session.fail(error, f"indexer of layer {layer}", fired=False)

    def _wrap(self, kernel: Kernel, original: Attention | None) -> Attention:
        layer_of, passes = self._modules.get, self._session.passes

        def recorded(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, Any]:
            function = own_eager(module) if original is None else original
            layer = layer_of(module)
            if layer is None or (self._forward is not None and passes(layer)):
                return function(module, query, key, value, attention_mask, **kwargs)
            result = function(module, query, key, value, attention_mask, **kwargs)
            self._take(kernel, KernelCall(module, query, key, value, attention_mask, kwargs, result[0]))
            return result

        return recorded

    def _wrap_tka1(self, original: Attention) -> Attention:
        def recorded(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, Any]:
            if module not in self._modules:
                return original(module, query, key, value, attention_mask, **kwargs)
            # The same computation; transformers has no place for the LSE, a trace has.
            out, lse = transformers_backend.attend(module, query, key, value, attention_mask, **kwargs)
            self._take(TKA1, KernelCall(module, query, key, value, attention_mask, kwargs, out, lse))
            return out, None

        return recorded

    def _take(self, kernel: Kernel, call: KernelCall) -> None:
        """Record a call that has just run, or let it wait. Nothing that happens here reaches the engine."""
        try:
            later = waiting(kernel, call, self._forward)
        except Exception as error:
            self._session.fail(error, f"layer {call.module.layer_idx}")
            return
        if later is None:
            self._look(kernel, call)
        else:
            self._waiting.append(later)

    def _look_at_waiting(self) -> None:
        """Record what waited for the end of its forward."""
        launches, self._waiting = self._waiting, []
        for later in launches:
            try:
                self._look(later.kernel, later.checked())
            except Unsupported as written:
                self._session.fail(written, f"layer {later.call.module.layer_idx}")

    def _look(self, kernel: Kernel, call: KernelCall) -> None:
        """Record a call now."""
        layer = call.module.layer_idx
        try:
            if call.module in self._refused:
                raise self._refused[call.module]
            if self._forward is None:
                raise Unsupported(
                    "its forward could not be read (see above), or it ran outside the model's forward.",
                    rule="T-FORWARD",
                )
            if not self._session.wants(layer):
                self._session.skip()
                return
            if not self._forward.placed:
                raise Unsupported("its cache was not seen before it was written to.", rule="T-CACHE")
            self._session.capture(capture_call(kernel, call, self._forward, self._session.arena))
            if layer in self._sparse and layer not in self._indexed:
                missing = Unsupported("its indexer chose rows outside its own forward.", rule="T-INDEXER")
                self._session.fail(missing, f"layer {layer}", fired=False)
        except Exception as error:
            self._session.fail(error, f"layer {layer}")


def _names(model: Any, modules: dict[Any, int]) -> dict[str, int]:
    return {name: modules[module] for name, module in model.named_modules() if module in modules}


def attention_modules(model: Any) -> dict[Any, int]:
    """Return the modules of a layer that are named as attention, which should call the interface."""
    return {
        module: int(module.layer_idx)
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and "attention" in type(module).__name__.lower()
    }


def own_eager(module: Any) -> Attention:
    """Return the eager function of the file that defines a module's class, which transformers would take.

    Raises:
        Unsupported: `T-EAGER` when there is none.
    """
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            found: Attention = function
            return found
    raise Unsupported(
        f"{type(module).__name__} has no eager_attention_forward beside it; set attn_implementation='sdpa'.",
        rule="T-EAGER",
    )


def _refuse_model(model: Any) -> None:
    if not hasattr(getattr(model, "config", None), "_attn_implementation"):
        raise Unsupported(
            f"{type(model).__name__} is no model of transformers; give one, or record calls of your own with "
            "session.attention(...) and without model=.",
            rule="T-MODEL",
        )
    kind = getattr(model.config, "model_type", "")
    if kind in LATER:
        raise Unsupported(
            f"{type(model).__name__}: {kind} is not recorded yet, because of {LATER[kind]}; "
            "record a model of the families that have ordinary attention.",
            rule="T-MODEL",
            model_type=kind,
        )
    for ratio in (getattr(model.config, "compress_rates", None) or {}).values():
        ratio_family(int(ratio))
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", "eager", "tracekit"):
        raise Unsupported(
            f"{type(model).__name__} runs {implementation}, which is not recorded; "
            "call model.set_attn_implementation('sdpa'), 'eager' or 'tracekit'.",
            rule="T-IMPLEMENTATION",
            implementation=implementation,
        )
