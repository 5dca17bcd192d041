"""Engine vLLM: records the attention of a model runner, without changing what it computes.

The recorder stands before methods of one engine's own objects: `execute_model` of its model runner, which
knows requests, tokens and positions, and the attention of each layer (`forward` of its implementation, or
what `vllm_dsv4` names), which knows the launch. It calls the original with the original arguments and
then reads back what the kernel has read.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from tracekit.engines.patch import EVIDENCE, Arguments, Entry, UntestedVersion, enter_all
from tracekit.engines.vllm_call import KernelCall, engine_name, observe_call
from tracekit.engines.vllm_dsv4 import v4_entries
from tracekit.engines.vllm_events import core_of, event_entries, groups_of, unfollowed
from tracekit.engines.vllm_gpu import GpuCall, observe_gpu
from tracekit.engines.vllm_identity import engine_identity
from tracekit.engines.vllm_mla import mla_entries
from tracekit.engines.vllm_points import (
    TESTED,
    attention_layers,
    is_mla,
    is_v4,
    layer_number,
    refuse_runner,
    run_tag,
    runner_of,
    schedulings,
)
from tracekit.engines.vllm_prefixes import Prefixes
from tracekit.engines.vllm_signatures import signature_of
from tracekit.engines.vllm_step import Requests, Step
from tracekit.errors import TracekitError, Unsupported
from tracekit.model import Tag
from tracekit.recorder.first_launch import FirstLaunches
from tracekit.recorder.observation import IndexerObservation, Observation
from tracekit.recorder.session import Session

_LAUNCH = ("layer", "query", "kv_cache", "attn_metadata", "output")
"""What is read of the arguments of an attention implementation."""

_UNREAD = object()
"""In place of what the scheduler says, until that was read."""


@contextmanager
def attach(session: Session, *, llm: Any) -> Iterator[None]:
    """Record the attention of an `LLM` whose engine runs in this process, until the context is left.

    Args:
        session: gets the calls.
        llm: a `vllm.LLM`, made with VLLM_ENABLE_V1_MULTIPROCESSING=0.

    Raises:
        Unsupported: `V-PROCESS`, `V-HOOK`, `V-BACKEND`, `V-SPECULATIVE` before anything is touched.

    Warns:
        UntestedVersion: the version lies outside the tested ones.
    """
    runner = runner_of(llm)
    with ExitStack() as stack:
        enter_all(stack, Recorder(session, runner, llm.llm_engine.engine_core.engine_core).entries(), [])
        yield


class Recorder:
    """The hooks of one model runner.

    Args:
        session: gets the calls.
        runner: vLLM's `GPUModelRunner`, or one that inherits from it.
        core: the `EngineCore` that drives it, where that is known; else there is no history.

    Raises:
        Unsupported: `V-HOOK`, `V-BACKEND`, `V-LAYER`, `V-SPECULATIVE`.
    """

    def __init__(self, session: Session, runner: Any, core: Any = None) -> None:
        refuse_runner(runner)
        self._session = session
        self._runner = runner
        self._layers = attention_layers(runner)
        self._numbers = {name: layer_number(name) for name in self._layers}
        session.names.update({number: name for name, number in self._numbers.items()})
        self._v4 = {name: layer for name, layer in self._layers.items() if is_v4(layer)}
        self._mla = {name: layer for name, layer in self._layers.items() if is_mla(layer)}
        self._gpu = {
            name: signature
            for name, layer in self._layers.items()
            if (signature := signature_of(getattr(layer, "impl", None)))
        }
        others = self._v4.keys() | self._mla.keys() | self._gpu.keys()
        self._scheduling = schedulings(runner, self._layers.keys() - others)
        self._requests = Requests(session, Prefixes(groups_of(runner)))
        self._core = core_of(core, runner)
        self._first = FirstLaunches()
        self._dummies: int | None = None
        self._scheduled: Any = None
        self._step: Step | None = None
        self._opened = False
        self._refused: TracekitError | None = None
        session.identity = engine_identity(runner)
        self._untested = not TESTED.hold(engine_name().partition(" ")[2])
        if self._untested:
            session.notes["version"] = f"{engine_name()} is outside the tested versions {TESTED}"
            warnings.warn(session.notes["version"], UntestedVersion, stacklevel=2)
        if self._gpu:
            kernels = ", ".join(sorted({signature.backend for signature in self._gpu.values()}))
            session.notes["evidence"] = f"{kernels}: {EVIDENCE}"
            warnings.warn(session.notes["evidence"], UntestedVersion, stacklevel=2)

    def entries(self) -> list[Entry]:
        """The attributes of this engine's objects that are wrapped; its classes stay as they are."""
        runner = self._runner
        entries = [
            Entry(
                "model runner", vars(runner), "execute_model", lambda _: self._wrap_step(runner.execute_model)
            )
        ]
        for name in (*self._scheduling, *self._gpu):
            impl = self._layers[name].impl
            entries.append(Entry(name, vars(impl), "forward", self._forward_of(name, impl)))
        entries += v4_entries(self._v4, self) + mla_entries(self._mla, self)
        if hasattr(runner, "_dummy_run"):
            dummy = runner._dummy_run
            entries.append(Entry("dummy run", vars(runner), "_dummy_run", lambda _: self._wrap_dummy(dummy)))
        lost = unfollowed(runner, self._core)
        if lost:
            self._session.history.lose(lost)
            return entries
        return entries + event_entries(self._core, runner, self._session, self._requests)

    def _wrap_dummy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def dummy_run(*args: Any, **kwargs: Any) -> Any:
            self._dummies = 0
            try:
                return original(*args, **kwargs)
            finally:
                fired, self._dummies = self._dummies, None
                self._session.other(run_tag(kwargs), expected=len(self._layers), fired=fired)

        return dummy_run

    def _forward_of(self, name: str, impl: Any) -> Callable[[Any], Any]:
        return lambda _: self._wrap_forward(name, impl.forward)

    def _wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        given = Arguments(original)

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            self._enter(given, args, kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                self._leave(f"the engine's step failed: {error!r}")
                raise
            self._leave()
            return result

        return execute_model

    def _wrap_forward(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        given = Arguments(original)

        def forward(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.look(name, lambda step: self._observe(name, given.of(args, kwargs, *_LAUNCH), step))
            return result

        return forward

    def _observe(self, name: str, given: tuple[Any, ...], step: Step) -> Observation:
        layer, query, cache, metadata, output = given
        number, impl = self._numbers[name], self._layers[name].impl
        if name in self._gpu:
            signature, engine = self._gpu[name], engine_name()
            return observe_gpu(
                GpuCall(name, number, signature, impl, query, cache, metadata, output, engine), step
            )
        plan = self._scheduling[name]
        return observe_call(KernelCall(name, number, layer, impl, query, cache, metadata, output, plan), step)

    @property
    def running(self) -> bool:
        """Whether a step of this engine runs: what its operators do at other times is another engine's."""
        return self._scheduled is not None

    def _enter(self, given: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._scheduled, self._step, self._opened, self._refused = _UNREAD, None, False, None
        try:
            (self._scheduled,) = given.of(args, kwargs, "scheduler_output")
            self._requests.begin(self._scheduled)
        except Exception as error:
            self._refused = _told(error)

    def _leave(self, failed: str = "") -> None:
        """The step is over. Nothing that happens here reaches the engine."""
        scheduled, self._scheduled = self._scheduled, None
        try:
            if not getattr(scheduled, "total_num_scheduled_tokens", 1):
                return
            if not self._opened:
                # No hook fired: a replayed graph, or a model that goes around the layers. The ledger says so.
                self._open(scheduled)
            if self._step is not None and not failed:
                self._requests.ran(self._step)
        except Exception as error:
            self._session.fail(error, "step", fired=False)
        self._session.end(failed, failed=bool(failed))

    def _open(self, scheduled: Any, launches: Callable[[], int] = lambda: 1) -> None:
        """Open the step in the session: at its first launch, when the input buffers are filled."""
        self._opened = True
        expected = len(self._layers)
        try:
            expected *= launches()
            if self._refused is None:
                step = self._requests.read(self._runner, scheduled)
                fresh = {handle: np.asarray(step.fresh.get(handle, []), np.int64) for handle in step.handles}
                self._session.begin(fresh, expected=expected, mode=step.mode, spans=step.spans)
                self._step = step
                return
        except Exception as error:
            self._refused = _told(error)
        self._session.history.lose(f"step {self._session.current} could not be read: {self._refused}")
        self._session.begin({}, expected=expected)
        self._session.fail(self._refused, "step", fired=False)

    def profiled(self) -> None:
        """Count an attention call over tokens that nobody sent."""
        if self._dummies is None:
            self._session.other(Tag.PROFILE, fired=1)
        else:
            self._dummies += 1

    def look(
        self, name: str, observe: Callable[[Step], Observation], launches: Callable[[], int] = lambda: 1
    ) -> None:
        """Record a launch of a layer that has already run. Nothing that happens here reaches the engine.

        Args:
            name: of the layer.
            observe: describes the launch.
            launches: says how often each layer launches in this step.
        """
        number = self._numbers[name]
        try:
            if self._scheduled is None:
                return self.profiled()
            if not self._opened:
                self._open(self._scheduled, launches)
            if self._step is None:
                return self._session.fail(self._refused or RuntimeError("no step"), "step")
            if not self._session.wants(number):
                return self._session.skip()
            seen = observe(self._step)
            if self._untested or name in self._gpu:
                self._first.check(seen)
            self._session.observe(seen)
        except Exception as error:
            self._session.fail(error, f"layer {number}")

    def look_indexers(self, name: str, observe: Callable[[Step], Iterable[IndexerObservation]]) -> None:
        """Record the launches of the indexer of a layer. The ledger counts attention; a problem cuts it."""
        number = self._numbers[name]
        if self._step is None or self._scheduled is None or not self._session.wants(number):
            return
        try:
            for seen in observe(self._step):
                if self._untested:
                    self._first.check_indexer(seen)
                self._session.observe_indexer(seen)
        except Exception as error:
            self._session.fail(error, f"indexer of layer {number}", fired=False)


def _told(error: Exception) -> TracekitError:
    """A step that could not be read, in a sentence."""
    if isinstance(error, TracekitError):
        return error
    return Unsupported(f"the step could not be read: {error!r}", rule="V-STEP")
