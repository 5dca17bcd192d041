"""Engine Megatron-core: records the core attention of a language model, forward and backward.

The recorder stands before `forward` of each core attention module of one model, calls the original with the
original arguments, and looks at what went in and out. Who a row is comes from the arguments of the model's
own forward. Where a layer is checkpointed, its launches are made again in the backward: the recorder wraps
what Megatron checkpoints, so that these launches find the forward that they belong to.
"""

import inspect
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from tracekit.engines.hooks import GONE, Hook
from tracekit.engines.megatron_backward import watch
from tracekit.engines.megatron_call import CoreCall, observe_call
from tracekit.engines.megatron_dsa import SparseWatch, observe_choice, observe_sparse
from tracekit.engines.megatron_history import Followed, spans
from tracekit.engines.megatron_identity import model_identity
from tracekit.engines.megatron_points import (
    TESTED,
    Core,
    Kind,
    core_attentions,
    engine_version,
    language_model,
    share_of,
)
from tracekit.engines.megatron_step import Forward, read_forward
from tracekit.engines.one_forward import OVERLAP, OneForward
from tracekit.engines.patch import EVIDENCE, Attributes, Entry, UntestedVersion, enter_all
from tracekit.errors import Unsupported
from tracekit.model import Mode
from tracekit.recorder.first_launch import FirstLaunches
from tracekit.recorder.observation import LateGradients, Observation
from tracekit.recorder.session import Session


@contextmanager
def attach(session: Session, *, model: Any, weights_digest: bool = True) -> Iterator[None]:
    """Record the attention of a model until the context is left.

    Args:
        session: gets the calls.
        model: a `GPTModel` or another language model of Megatron-core, bare or in its wrappers.
        weights_digest: whether to hash the weights for the identity of the trace.

    Raises:
        Unsupported: `M-MODEL`, `M-HOOK`, `M-CORE`, `M-LAYER`, `M-CP` before anything is touched.

    Warns:
        UntestedVersion: the version lies outside the tested ones.
    """
    recorder = Recorder(session, language_model(model))
    session.identity = model_identity(language_model(model), weights=weights_digest)
    with ExitStack() as stack:
        stack.callback(_end, weakref.ref(recorder))
        enter_all(stack, recorder.entries(), recorder.hooks())
        # From here on only the model's hooks hold the recorder: a program that deletes its model gets its
        # memory back.
        del recorder, model
        yield


class Recorder:
    """The hooks of one model, which alone hold them; what stands elsewhere in Megatron or torch does not.

    Raises:
        Unsupported: `M-HOOK`, `M-CORE`, `M-LAYER`, `M-CP`.
    """

    _ended = True
    """Until it is made: one whose model is refused has nothing to tell when it goes."""

    def __init__(self, session: Session, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._session = session
        self._cores = {core.layer: core for core in core_attentions(model)}
        self._signature = inspect.signature(type(model).forward)
        self._turn = OneForward()
        self._forward: Forward | None = None
        self._recomputed: tuple[Forward, int] | None = None
        self._followed = Followed(session, model, self._end_recompute)
        self._checkpointing = False
        self._first = FirstLaunches()
        self._sparse = SparseWatch()
        session.names.update({core.layer: core.name for core in self._cores.values()})
        session.share = share_of(next(iter(self._cores.values())).module)
        session.rank = 0 if session.share is None else session.share.tensor
        self._untested = not TESTED.hold(engine_version())
        if self._untested:
            session.notes["version"] = (
                f"megatron-core {engine_version()} is outside the tested versions {TESTED}"
            )
            warnings.warn(session.notes["version"], UntestedVersion, stacklevel=2)
        if any(core.kind is Kind.TRANSFORMER_ENGINE for core in self._cores.values()):
            session.notes["evidence"] = f"TEDotProductAttention: {EVIDENCE}"
            warnings.warn(session.notes["evidence"], UntestedVersion, stacklevel=2)

        self._ended = False

    def entries(self) -> list[Entry]:
        """The attributes that are wrapped: of this model's modules, and Megatron's checkpoint function."""
        from megatron.core import tensor_parallel
        from megatron.core.tensor_parallel import random

        entries = [
            Entry(core.name, Attributes(core.module), "forward", partial(CoreForward, self, core))
            for core in self._cores.values()
        ]
        for module in (random, tensor_parallel):
            entries.append(Entry("checkpoint", vars(module), "checkpoint", self._wrap_checkpoint))
        if any(core.kind is Kind.SPARSE for core in self._cores.values()):
            entries.extend(self._sparse.entries())
        return [*entries, *self._followed.entries()]

    def hooks(self) -> list[Callable[[], Any]]:
        """Registrations of module hooks; each returns a handle."""
        model = self._model()
        assert model is not None
        before, after = Hook(self._before_forward), Hook(self._after_forward)
        return [
            partial(model.register_forward_pre_hook, before, with_kwargs=True),
            partial(model.register_forward_hook, after, always_call=True),
            *self._followed.hooks(),
        ]

    def end(self) -> None:
        """The recording ends: graphs that are still alive give nothing any more."""
        if self._ended:
            return
        self._ended = True
        self._end_recompute()

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """The model is gone; or its hooks alone are, and what it runs from here on nobody sees."""
        if _ends():
            return
        if not self._ended and self._model() is not None:
            self._miss(Unsupported(GONE, rule="M-HOOKS"))
            self._session.end()
        self.end()

    def run(self, layer: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the core attention of a layer, and record the launch."""
        core = self._cores[layer]
        self._sparse.clear()
        if core.kind is Kind.TKA1:
            # The same computation; Megatron has no place for the LSE, a trace has.
            result, lse = core.module.attend(*args, **kwargs)
        else:
            result, lse = original(*args, **kwargs), None
        self._look(core, args, kwargs, result, lse)
        self._sparse.clear()
        return result

    def _wrap_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        reference = weakref.ref(self)

        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            recorder = reference()
            within = function if recorder is None else recorder.within(function)
            return original(within, *args, **kwargs)

        return checkpoint

    def within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function to checkpoint whose runs find the forward that they belong to."""
        forward, runs = None if self._turn.elsewhere() else self._forward, 0

        def within(*inputs: Any) -> Any:
            nonlocal runs
            runs += 1
            if forward is None or self._ended:
                return function(*inputs)
            with self._checkpoint() if runs == 1 else self._recompute(forward, runs):
                return function(*inputs)

        return within

    @contextmanager
    def _checkpoint(self) -> Iterator[None]:
        """The first run of a checkpointed function: its launches will be made again."""
        outer, self._checkpointing = self._checkpointing, True
        try:
            yield
        finally:
            self._checkpointing = outer

    @contextmanager
    def _recompute(self, forward: Forward, runs: int) -> Iterator[None]:
        """A later run, in a backward: a step of its own, of the tokens of its forward."""
        try:
            if forward.checkpointed and self._recomputed != (forward, runs):
                self._end_recompute()
                self._recomputed = forward, runs
                forward.recomputed += 1
                expected, rows = forward.checkpointed, spans(forward)
                self._session.begin({}, expected=expected, mode=Mode.RECOMPUTE, spans=rows)
        except Exception as error:
            self._session.fail(error, "recompute", fired=False)
        outer, self._forward = self._forward, forward
        try:
            yield
        except BaseException:
            self._end_recompute(failed=True)
            raise
        finally:
            self._forward = outer

    def _end_recompute(self, *, failed: bool = False) -> None:
        if self._recomputed is not None:
            self._recomputed = None
            self._session.end(failed=failed)

    def _miss(self, error: Exception) -> None:
        """A forward of which nothing is recorded is a step that lost all its calls."""
        self._session.begin({}, expected=len(self._cores))
        self._session.fail(error, "forward", fired=False)

    def _before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        if not self._turn.take():
            return
        self._forward = None
        expected = len(self._cores)
        try:
            self._end_recompute()
            given = self._signature.bind(model, *args, **kwargs).arguments
            forward = read_forward(given)
            tokens = forward.open(self._session.requests.open)
            training = model.training and torch.is_grad_enabled()
            self._followed.look()
            self._session.begin(
                tokens,
                expected=expected,
                mode=Mode.TRAINING if training else None,
                spans=spans(forward),
            )
            self._forward = forward
        except Exception as error:
            self._miss(error)

    def _after_forward(self, _: Any, __: Any, result: Any) -> None:
        if self._turn.refused():
            return
        self._forward = None
        try:
            self._session.end(failed=result is None)
            while self._turn.missed:
                self._turn.missed -= 1
                self._miss(Unsupported(OVERLAP, rule="M-THREADS"))
                self._session.end()
        except Exception as error:
            self._session.fail(error, "end of the forward", fired=False)
        finally:
            self._turn.leave()

    def _look(self, core: Core, args: Any, kwargs: Any, result: torch.Tensor, lse: Any) -> None:
        """Record a launch that has already run. Nothing that happens here reaches the engine."""
        if self._turn.elsewhere():
            return
        try:
            forward = self._forward
            if forward is None:
                raise Unsupported(
                    "its forward could not be read (see above), or it ran outside the model's forward.",
                    rule="M-FORWARD",
                )
            forward.checkpointed += self._checkpointing
            self._session.history.launched(core.layer, owes=False)
            if not self._session.wants(core.layer):
                self._session.skip()
                return
            if core.kind is Kind.SPARSE:
                self._look_sparse(core, forward)
                return
            bound = core.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            call = CoreCall(core, bound.arguments, result, lse)
            late = LateGradients(core.module.training) if result.requires_grad else None
            seen = observe_call(call, forward, late)
            self._check(core, seen)
            self._session.observe(seen)
            if late is not None:
                self._watch(call, forward, late, seen.provenance.executed.kernel)
        except Exception as error:
            self._session.fail(error, f"layer {core.layer}")

    def _look_sparse(self, core: Core, forward: Forward) -> None:
        """Record a sparse launch and the choice of its indexer; gradients of it are not recorded."""
        seen = observe_sparse(core, self._sparse.attention, forward)
        self._check(core, seen)
        self._session.observe(seen)
        if self._sparse.choice is None:
            # A layer that shares the choice of another, or that trains its indexer in a fused function.
            self._session.notes["indexers"] = f"the choice of layer {core.layer} was not seen"
            return
        try:
            choice = observe_choice(core, self._sparse.choice, forward)
            if self._untested:
                self._first.check_indexer(choice)
            self._session.observe_indexer(choice)
        except Exception as error:
            self._session.fail(error, f"indexer of layer {core.layer}", fired=False)

    def _check(self, core: Core, seen: Observation) -> None:
        """What nobody has tested shows its conventions at the first launches of each layer."""
        if self._untested or core.kind is Kind.TRANSFORMER_ENGINE:
            self._first.check(seen)

    def _watch(self, call: CoreCall, forward: Forward, late: LateGradients, kernel: str) -> None:
        computed = self._followed.computed(call.core.layer, kernel)
        try:
            watch(call, forward, late, lambda: self._ended, computed)
        except Unsupported as error:
            late.lost = str(error)
            return
        self._session.history.launched(call.core.layer, owes=True)


class CoreForward:
    """Stands before `forward` of a core attention, in the module's own attributes.

    Args:
        recorder: held weakly.
        core: the module, likewise.
        own: what stood there before; None where that was the method of its class.
    """

    def __init__(self, recorder: Recorder, core: Core, own: Callable[..., Any] | None) -> None:
        self._recorder, self._module = weakref.ref(recorder), weakref.ref(core.module)
        self._layer, self._own = core.layer, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and record the launch."""
        recorder = self._recorder()
        module: Any = self._module()
        own = self._own or types.MethodType(type(module).forward, module)
        return own(*args, **kwargs) if recorder is None else recorder.run(self._layer, own, args, kwargs)


def _end(reference: "weakref.ref[Recorder]") -> None:
    recorder = reference()
    if recorder is not None:
        recorder.end()
