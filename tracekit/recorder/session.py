"""A recording while it runs: owned copies, a ledger, and at the end the nouns.

An engine's hook calls `begin`, then `wants` and `capture` or `skip` once a launch, then `end`. Nothing that
goes wrong here may disturb the engine, and nothing may pass silently: a hook hands its error to `fail`, which
cuts the step in the ledger and lists the problem for the report at the end.

What can wait waits: a launch is kept as copies of its tensors and a function that describes it, and is
described, checked and given its LSE when the engine has finished.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from tracekit.errors import TracekitError, Unsupported
from tracekit.model import (
    Array,
    AttentionCall,
    Bits,
    Identity,
    IndexerCall,
    Mode,
    Recording,
    Share,
    Tag,
)
from tracekit.model.events import NewWeights
from tracekit.recorder.choice import Choice
from tracekit.recorder.derive import derive_lse
from tracekit.recorder.filters import Filters
from tracekit.recorder.held import Held
from tracekit.recorder.history import Computed, HistoryLog
from tracekit.recorder.lacking import missing_gradients, nothing_kept
from tracekit.recorder.ledger import Ledger, OpenStep
from tracekit.recorder.observation import (
    Handle,
    IndexerObservation,
    Launch,
    Observation,
)
from tracekit.recorder.requests import RequestTable


class Session:
    """One recording.

    `problems` lists what went wrong, in words; `notes` is free text for `inspect`; `written` is what the
    writer of the trace gave back; `indexer_calls` are the launches of sparse indexers, once `finish` has run;
    `rank` is that of this process among those that share the heads of one launch; `share` says which part
    of a parallel job the recording is; `history` is what the engine said that it did, and `updates` how
    often its weights changed meanwhile.

    Args:
        filters: what to keep.
        derive: gives the LSE of a call whose kernel gave none; None leaves it out.
        budget: most bytes of captured rows; None is no limit.
    """

    def __init__(
        self,
        filters: Filters | None = None,
        derive: Callable[[AttentionCall], Bits] | None = derive_lse,
        budget: int | None = None,
    ) -> None:
        self.requests = RequestTable()
        self._choice = Choice(filters or Filters(), self.requests)
        self._never = self._choice.never
        self.identity = Identity()
        self.rank = 0
        self.share: Share | None = None
        self.notes: dict[str, str] = {}
        self.problems: list[str] = []
        self.written: object = None
        self.astray: Callable[[], None] | None = None
        """Called once, with the first step of a process that was forked: nobody writes what it records."""
        self.history = HistoryLog()
        self.updates = 0
        self.indexer_calls: list[IndexerCall] = []
        self._derive = derive
        self._held = Held(self.requests, budget)
        self.arena = self._held.arena
        self._spent = ""
        self._ledger = Ledger()
        self._open: OpenStep | None = None
        self._mode = Mode.PREFILL

    @property
    def names(self) -> dict[int, str]:
        """The name of each layer's module, such as `model.layers.3.self_attn`, as far as they are known."""
        return self._choice.names

    @property
    def captured(self) -> int:
        """Bytes of captured rows so far."""
        return self._held.size

    @property
    def recorded(self) -> int:
        """Launches of attention that were kept so far."""
        return self._held.count

    @property
    def current(self) -> int:
        """The number of the step that runs or comes next."""
        return self._ledger.steps

    @property
    def weights(self) -> int:
        """The version of the weights in force."""
        return self.identity.model_version + self.updates

    def begin(
        self,
        tokens: Mapping[Handle, Array],
        *,
        expected: int | None = None,
        mode: Mode | None = None,
        spans: Mapping[Handle, Computed] | None = None,
    ) -> None:
        """Begin a step.

        Args:
            tokens: the new tokens of each request of the step.
            expected: hooks that should fire; None where that is not known.
            mode: why the step is made; None tells prefill from decode by the tokens.
            spans: the rows of each request, and why each request has them, from adapters that follow the
                history of requests (docs/gate.md); a step without them ends the history.
        """
        self.end("the step before it did not end")
        if self.astray is not None:
            astray, self.astray = self.astray, None
            astray()
        modes = {handle: self.requests[handle].extend(new) for handle, new in tokens.items() if len(new)}
        self._mode = mode or (Mode.DECODE if set(modes.values()) == {Mode.DECODE} else Mode.PREFILL)
        if spans is not None:
            each = {handle: mode or modes.get(handle, self._mode) for handle in spans}
            self.history.begin(self.current, spans, each, self.weights)
        else:
            self.history.unsaid(self.current)
        self._open = OpenStep(self.current, expected)
        self._choice.begin(self.current, tokens, self._mode)
        self._choice.shut |= bool(self._spent)
        self.arena.work()

    def new_weights(self) -> None:
        """The weights were updated between two steps."""
        self.updates += 1
        self.history.tell(NewWeights(self.weights))

    @property
    def skips_steps(self) -> bool:
        """Whether a filter may leave out whole steps, whose KV nobody compares."""
        return self._choice.filters.skips_steps

    def lose_kv(self, handles: Iterable[Handle]) -> None:
        """The KV of some requests changed before the step that comes next, and no step compared it.

        Their tokens are sound so far; launches over their KV are cut from here on.
        """
        for handle in handles:
            self.requests[handle].lose(self.current)
        self.history.lose(f"KV was reordered or written over before step {self.current}")

    def wants(self, layer: int) -> bool:
        """Whether a launch of this layer in the step that runs is to be captured; else `skip` counts it.

        Decided before any tensor is touched. Where only some rows of a launch are wanted it is True.
        """
        return self._choice.wants(layer)

    def passes(self, layer: int) -> bool:
        """Count a launch that is not wanted; whether that was so."""
        if layer in self._never and self._open is not None and not self._spent:
            self._open.filtered += 1  # what every launch of a filtered layer pays
            return True
        if self._choice.wants(layer):
            return False
        self.skip()
        return True

    def skip(self) -> None:
        """Count a launch that `wants` did not want."""
        step = self._running()
        if self._spent:
            step.looked_at += 1
            step.cut(self._spent)
        else:
            step.filtered += 1

    def other(self, tag: Tag, *, expected: int = 0, fired: int = 0) -> None:
        """Count a run of the engine that is no step, over tokens that nobody sent.

        Args:
            tag: what it was.
            expected: hooks that such a run could have fired.
            fired: hooks that fired.
        """
        self._ledger.other(tag, expected, fired)

    def observe(self, seen: Observation) -> None:
        """Keep a launch that is described already, or count it as filtered; see `capture`.

        Raises:
            TracekitError: the launch breaks a rule; give the error to `fail`.
        """
        if not self.wants(seen.layer):
            self.skip()
            return
        self.requests.tokens_of(seen)
        described = replace(seen, kv={})
        self.capture(Launch(seen.layer, seen.kv, seen.size, lambda: described))

    def capture(self, launch: Launch) -> None:
        """Keep a launch that `wants` wanted. Its KV rows are compared and logged now; the rest waits.

        A launch over KV that changed without a new generation is cut here: nobody knows which tokens its
        rows are made of. The launch that would pass the budget ends the recording, and so do all after it.

        Raises:
            TracekitError: the launch breaks a rule; give the error to `fail`.
        """
        step = self._running()
        kept, size = launch, launch.size
        if self._choice.of_rows:
            some = self._choice.take(launch)
            if some is None:
                self.skip()
                return
            kept, left_out = some
            step.left_out += left_out
        step.wanted += size
        if not self._held.fits(kept.size):
            self._spend(step)
            step.looked_at += 1
            return
        try:
            stored = self._held.keep(self.current, self._mode, kept)
        except Unsupported as changed:
            self.fail(changed, f"layer {launch.layer}")
            return
        step.wanted += stored
        step.written += stored + kept.size
        step.looked_at += 1
        step.recorded += 1

    def observe_indexer(self, seen: IndexerObservation) -> None:
        """Keep a launch of a sparse indexer: what the filters keep of it, and the budget has room for.

        The ledger counts attention; the bytes of indexers count for the budget.

        Raises:
            TracekitError: the launch breaks a rule, or its keys changed; give the error to `fail`.
        """
        step = self._running()
        some = self._choice.take_indexer(seen) if self.wants(seen.layer) else None
        if some is None:
            return
        if self._held.fits(some.size):
            self._held.keep_indexer(self.current, some)
        else:
            self._spend(step)

    def _spend(self, step: OpenStep) -> None:
        """End the recording: the budget would be passed. The engine goes on."""
        self._spent = f"cut: budget of {self._held.budget:,} bytes"
        self._choice.shut = True
        step.cut(self._spent)
        self.problems.append(
            f"step {step.step}: the {self._spent.removeprefix('cut: ')} is used up; nothing was recorded "
            "from there on. Raise it, or record fewer layers or steps."
        )

    def fail(self, error: Exception, where: str, *, fired: bool = True) -> None:
        """Note that a hook failed; the engine goes on.

        Args:
            error: what went wrong.
            where: the place, `layer 3`.
            fired: whether the hook of a launch failed (else the step as a whole).
        """
        text = f"{where}: {error}" if isinstance(error, TracekitError) else f"{where}: {error!r}"
        step = self._running()
        step.looked_at += fired
        if step.cut(text):
            self.problems.append(f"step {self.current}, {text}")

    def end(self, cut: str = "", *, failed: bool = False) -> None:
        """End the step that runs, if one does.

        Args:
            cut: why it lacks calls.
            failed: whether the engine's forward raised.
        """
        self.history.end(failed=failed)
        if self._open is None:
            return
        self.arena.rest()
        step, self._open = self._open, None
        if cut:
            step.cut(cut)
        told = len(step.reasons) - bool(cut)
        line = self._ledger.close(step)
        if len(step.reasons) > told:
            self.problems.append(f"step {line.step}: {step.reasons[-1]}")

    def interrupt(self, reason: str) -> None:
        """The program ended before its recording did: the last step may lack calls."""
        self.notes["recording"] = reason
        if self._open is not None:
            self.end(reason)
        elif self._ledger.steps:
            self._ledger.cut(self._ledger.steps - 1, reason)

    def finish(
        self, progress: Callable[[int, int, str], None] | None = None
    ) -> tuple[Recording, list[AttentionCall]]:
        """Return the nouns. Requests get their keys, calls their rows of the KV log, and a derived LSE.

        Args:
            progress: called with (done, total, text) after each call.

        Raises:
            Unsupported: `R-BYPASS` when steps ran and no hook fired in any of them; `R-NOTHING` when calls
                were seen and none of them could be kept.
            NothingSelected: `R-FILTER` when the filters left nothing.
        """
        self.end()
        requests = self.requests.resolve()
        calls: list[AttentionCall] = []
        for number, kept, call in self._held.calls(self.rank, self._derive):
            if isinstance(call, TracekitError):
                self._lose(kept.step, kept.layer, call, recorded=1, written=kept.size)
            else:
                calls.append(call)
            if progress is not None:
                progress(number, self.recorded, "calls described")
        for chosen, indexed in self._held.indexer_calls():
            if isinstance(indexed, TracekitError):
                self._lose(chosen.step, chosen.seen.layer, indexed)
            else:
                self.indexer_calls.append(indexed)
        if self._ledger.steps and not calls:
            raise nothing_kept(self._ledger, self.identity.architecture, self.problems)
        lacking = missing_gradients(self._held.late)
        if lacking:
            self.notes["gradients"] = lacking
            self.problems.append(f"gradients are {lacking}")
        lines = tuple(self._ledger.lines)
        history = self.history.resolve(self.requests.key)
        return Recording(self.identity, requests, lines, dict(self.notes), self.share, history), calls

    def _lose(
        self, step: int, layer: int, error: TracekitError, *, recorded: int = 0, written: int = 0
    ) -> None:
        """A call that was seen but is not legal: take it off its ledger line, with the reason."""
        text = f"layer {layer}: {error}"
        self._ledger.cut(step, text, recorded=recorded, written=written)
        self.problems.append(f"step {step}, {text}")

    def _running(self) -> OpenStep:
        if self._open is None:
            self._open = OpenStep(self.current, None)
        return self._open
