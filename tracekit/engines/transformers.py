"""Engine transformers: records any model that dispatches through its attention interface, unchanged.

The functions that the model is set to run stay the ones that run: the recorder stands in the dispatch
table in their place, calls the original with the original arguments, and looks at what went in and out.
"""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling
from transformers import AttentionInterface

from tracekit.engines import transformers_backend
from tracekit.engines.one_forward import OVERLAP, OneForward
from tracekit.engines.patch import Entry, enter_all
from tracekit.engines.transformers_call import capture_call, check_cache
from tracekit.engines.transformers_common import Common, common
from tracekit.engines.transformers_dispatch import Hook, WeakHook, wrap, wrap_tka1
from tracekit.engines.transformers_identity import model_identity
from tracekit.engines.transformers_indexer import Watch, describe, indexer_of, observe_indexer
from tracekit.engines.transformers_kernel import EAGER, SDPA, Arguments, Kernel, KernelCall
from tracekit.engines.transformers_points import COMPILED, attention_modules, module_names, refuse_model
from tracekit.engines.transformers_proof import ProvenWeights, settled_before_updates
from tracekit.engines.transformers_reorder import Reorders
from tracekit.engines.transformers_step import (
    Forward,
    Sequences,
    cache_of,
    new_tokens,
    read_forward,
)
from tracekit.engines.transformers_waiting import Copies, Waiting, may_wait
from tracekit.errors import TracekitError, Unsupported
from tracekit.model import Mode
from tracekit.recorder.history import Computed
from tracekit.recorder.session import Session


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
    refuse_model(model)
    if weights_digest:
        session.identity = model_identity(model)
    recorder = Recorder(session, model)
    with ExitStack() as stack:
        enter_all(stack, recorder.entries(), recorder.hooks())
        stack.callback(_close, weakref.ref(recorder))
        # From here on only the model's hooks hold the recorder, and the recorder holds no model: a program
        # that deletes its model gets its memory back.
        del recorder, model
        yield


class Recorder:
    """The hooks of one model. The model holds them, and they hold the model weakly; they end with it."""

    def __init__(self, session: Session, model: Any) -> None:
        self._session = session
        self._model = weakref.ref(model)
        modules = attention_modules(model)
        self._modules = weakref.WeakKeyDictionary(modules)
        # A look into a table of weak keys costs twice as much, and every launch needs one.
        self._known = {id(module): (weakref.ref(module), layer) for module, layer in modules.items()}
        session.names.update({layer: name for name, layer in module_names(model, modules).items()})
        self._sequences = Sequences(session)
        self._weights = ProvenWeights(model, session.history.doubt)
        self._reorders = Reorders()
        self._signature = inspect.signature(type(model).forward)
        self._turn = OneForward()
        self._forward: Forward | None = None
        self._refused: dict[int, TracekitError] = {}
        self._layers = weakref.WeakKeyDictionary(
            {
                indexer: int(module.layer_idx)
                for module in modules
                if (indexer := indexer_of(module)) is not None
            }
        )
        self._sparse = frozenset(self._layers.values())
        self._watches: dict[int, tuple[Watch, ExitStack]] = {}
        self._indexed: set[int] = set()
        self._waiting: list[Waiting] = []
        self._hopeless: set[int] = set()
        """Layers that waited in vain: they are looked at before anything of them is copied."""
        self._compiled = False
        self._closed = False

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """The model is gone. Where Python is (a forked child closes nothing), torch must not be called."""
        if not _ends():
            self.close()

    def entries(self) -> list[Entry]:
        """The rows of transformers' dispatch table that are wrapped."""
        table = AttentionInterface._global_mapping
        entries = [
            Entry("transformers sdpa", table, "sdpa", lambda original: wrap(self, SDPA, original)),
            Entry("transformers eager", table, "eager", lambda original: wrap(self, EAGER, original)),
        ]
        if transformers_backend.NAME in table:
            name = "tracekit on TKA-1"
            entries.append(Entry(name, table, transformers_backend.NAME, partial(wrap_tka1, self)))
        return entries

    def hooks(self) -> list[Callable[[], Any]]:
        """Registrations of module hooks; each returns a handle."""
        model = self._model()
        assert model is not None
        before, after = Hook(self.before_forward), Hook(self.after_forward)
        hooks: list[Callable[[], Any]] = [
            lambda: model.register_forward_pre_hook(before, with_kwargs=True),
            lambda: model.register_forward_hook(after, always_call=True),
            lambda: settled_before_updates(self._weights),
        ]
        if self._modules:
            first = min(self._modules, key=lambda module: self._modules[module])
            hook = WeakHook(self._before_attention)
            hooks.append(partial(first.register_forward_pre_hook, hook, with_kwargs=True))
        for indexer in self._layers:
            hooks.append(partial(indexer.register_forward_pre_hook, WeakHook(self._before_indexer)))
            hooks.append(
                partial(indexer.register_forward_hook, WeakHook(self._after_indexer), always_call=True)
            )
        return hooks

    def before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        """Begin a step: read which tokens the forward is about."""
        if is_compiling():
            self._note_compiled()
            return
        if not self._is_mine(model) or not self._turn.take():
            return
        self._look_at_waiting()
        self._forward, self._refused = None, {}
        self._indexed.clear()
        expected = len(self._modules)
        try:
            forward = read_forward(self._signature, (model, *args), kwargs, self._sequences)
            training = model.training and torch.is_grad_enabled()
            fresh = new_tokens(forward, self._session)
            if self._session.skips_steps and self._reorders.moved(forward.cache):
                self._session.lose_kv(forward.handles)
            if self._weights.changed(self._session.current):
                self._session.new_weights()
            held = {handle: len(self._session.requests[handle].tokens) for handle in fresh}
            self._session.begin(
                fresh,
                expected=expected,
                mode=Mode.TRAINING if training else None,
                spans={h: Computed(held[h], held[h] + len(new)) for h, new in fresh.items()},
            )
            forward.implementation = str(model.config._attn_implementation)
            self._forward = forward
            if forward.cache is not None:
                self._place(forward.cache, forward)
        except Exception as error:
            self._miss(error)

    def after_forward(self, model: Any, _: Any, result: Any) -> None:
        """End the step."""
        if is_compiling() or not self._is_mine(model) or self._turn.refused():
            return
        try:
            self._look_at_waiting()
            if self._session.skips_steps and self._forward is not None:
                self._reorders.remember(self._forward.cache)
            self._forward = None
            self._session.end(failed=result is None)
            self._tell_missed()
        except Exception as error:
            self._session.interrupt(f"a hook failed: {error!r}")
        finally:
            self._turn.leave()

    def close(self) -> None:
        """The recording of the model ends, or the model does."""
        if self._closed:
            return
        self._closed = True
        try:
            self._session.end("the forward did not end")
            self._tell_missed()
            if self._compiled:
                self._miss(Unsupported(COMPILED, rule="T-COMPILED"))
                self._session.end()
            self._weights.settle()
        except Exception as error:
            self._session.interrupt(f"the recorder could not end: {error!r}")

    def _is_mine(self, model: Any) -> bool:
        return self._model() is model

    def _miss(self, error: Exception) -> None:
        """A forward of which nothing is recorded is a step that lost all its calls."""
        self._session.begin({}, expected=len(self._modules))
        self._session.fail(error, "forward", fired=False)

    def _tell_missed(self) -> None:
        while self._turn.missed:
            self._turn.missed -= 1
            self._miss(Unsupported(OVERLAP, rule="T-THREADS"))
            self._session.end()

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _note_compiled(self) -> bool:
        """torch calls this when it traces; the compiled forward then runs without any hook."""
        self._compiled = True
        return True

    def _before_attention(self, module: Any, _: Any, kwargs: Any) -> None:
        """See a cache that the model has made itself, before the first layer writes to it."""
        if is_compiling() or self._turn.elsewhere():
            return
        if self._forward is not None and not self._forward.placed:
            cache = cache_of(kwargs)
            self._sequences.bind(cache, self._forward.handles)
            self._place(cache, self._forward)

    def _place(self, cache: Any, forward: Forward) -> None:
        """Find out for every layer where its rows will stand, before any layer writes."""
        forward.placed = True
        for layer in self._modules.values():
            try:
                check_cache(layer, cache, forward)
            except TracekitError as error:
                self._refused[layer] = error

    def _before_indexer(self, module: Any, _: Any) -> None:
        layer = self._layers.get(module)
        if layer is None or is_compiling() or self._turn.elsewhere():
            return
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
        self._watches[layer] = watch, stack

    def _after_indexer(self, module: Any, _: Any, result: Any) -> None:
        layer = self._layers.get(module)
        if is_compiling() or self._turn.elsewhere() or layer not in self._watches:
            return
        watch, stack = self._watches.pop(layer)
        stack.close()
        self._indexed.add(layer)
        if result is None or self._forward is None:
            return
        try:
            self._session.observe_indexer(observe_indexer(module, layer, watch, self._forward))
        except Exception as error:
            self._session.fail(error, f"indexer of layer {layer}", fired=False)

    def looks(self, module: Any) -> bool:
        """Whether the call of a module is to be recorded; one that is filtered out is counted."""
        if is_compiling() or self._turn.elsewhere():
            return False
        known = self._known.get(id(module))
        if known is None or known[0]() is not module:
            return False
        return self._forward is None or not self._session.passes(known[1])

    def take(self, kernel: Kernel, call: KernelCall) -> None:
        """Record a call that has just run, or let it wait. Nothing that happens here reaches the engine."""
        layer = call.module.layer_idx
        try:
            forward = self._ready(layer)
            if not self._session.wants(layer):
                self._session.skip()
            elif layer not in self._hopeless and may_wait(call, forward):
                self._waiting.append(Waiting.of(kernel, call, self._session.arena))
            else:
                arguments = call.arguments()
                shared = common(kernel, arguments, forward)  # what is refused is not copied
                self._keep(shared, arguments, forward, Copies.of(call, self._session.arena))
        except Exception as error:
            self._session.fail(error, f"layer {layer}")

    def _look_at_waiting(self) -> None:
        """Record what waited for the end of its forward."""
        launches, self._waiting = self._waiting, []
        for later in launches:
            layer = later.module.layer_idx
            try:
                if self._session.wants(layer):  # the budget may have been spent since
                    call, forward = later.checked(), self._ready(layer)
                    self._keep(common(later.kernel, call, forward), call, forward, later.copies)
                else:
                    self._session.skip()
            except Exception as error:
                self._hopeless.add(layer)
                self._session.fail(error, f"layer {layer}")

    def _ready(self, layer: int) -> Forward:
        """Return the forward that runs, in which calls of a layer can be recorded; raise why they cannot."""
        if layer in self._refused:
            raise self._refused[layer]
        if self._forward is None:
            raise Unsupported(
                "its forward could not be read (see above), or it ran outside the model's forward.",
                rule="T-FORWARD",
            )
        if not self._forward.placed:
            raise Unsupported("its cache was not seen before it was written to.", rule="T-CACHE")
        return self._forward

    def _keep(self, shared: Common, call: Arguments, forward: Forward, copies: Copies) -> None:
        """Record a call now."""
        layer = call.module.layer_idx
        self._session.capture(capture_call(shared, call, forward, copies))
        if layer in self._sparse and layer not in self._indexed:
            missing = Unsupported("its indexer chose rows outside its own forward.", rule="T-INDEXER")
            self._session.fail(missing, f"layer {layer}", fired=False)


def _close(reference: "weakref.ref[Recorder]") -> None:
    recorder = reference()
    if recorder is not None:
        recorder.close()
