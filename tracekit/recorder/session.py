"""A recording while it runs: owned copies, a ledger, and at the end the nouns.

An engine's hook calls `begin`, then `observe` or `skip` once a launch, then `end`. Nothing that goes wrong
here may disturb the engine, and nothing may pass silently: a hook hands its error to `fail`, which cuts the
step in the ledger and lists the problem for the report at the end.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tracekit.errors import NothingSelected, TracekitError, Unsupported
from tracekit.model import (
    Array,
    AttentionCall,
    Bits,
    Gradients,
    Identity,
    IndexerCall,
    KVFamily,
    Mode,
    Origin,
    Output,
    Recording,
    Rows,
    StepRecord,
)
from tracekit.recorder.derive import derive_lse
from tracekit.recorder.filters import Filters
from tracekit.recorder.kept import Kept, KeptIndexer
from tracekit.recorder.kv_log import Extent, KVLog, RowChanged
from tracekit.recorder.ledger import OpenStep
from tracekit.recorder.observation import (
    Handle,
    IndexerObservation,
    LateGradients,
    Observation,
    SeenKV,
)
from tracekit.recorder.requests import Lost, RequestTable


class Session:
    """One recording.

    `problems` lists what went wrong, in words; `notes` is free text for `inspect`; `written` is what the
    writer of the trace gave back; `indexer_calls` are the launches of sparse indexers, once `finish` has run;
    `rank` is that of this process among those that share the heads of one launch.

    Args:
        filters: what to keep.
        derive: gives the LSE of a call whose kernel gave none; None leaves it out.
    """

    def __init__(
        self, filters: Filters | None = None, derive: Callable[[AttentionCall], Bits] | None = derive_lse
    ) -> None:
        self.filters = filters or Filters()
        self.requests = RequestTable()
        self.identity = Identity()
        self.rank = 0
        self.notes: dict[str, str] = {}
        self.problems: list[str] = []
        self.written: object = None
        self._derive = derive
        self.indexer_calls: list[IndexerCall] = []
        self._kept: list[Kept] = []
        self._kept_indexers: list[KeptIndexer] = []
        self._logs: dict[tuple[Handle, int, KVFamily], KVLog] = {}
        self._ledger: list[StepRecord] = []
        self._open: OpenStep | None = None
        self._mode = Mode.PREFILL

    @property
    def current(self) -> int:
        """The number of the step that runs or comes next."""
        return len(self._ledger)

    @property
    def recorded(self) -> int:
        """Calls that were kept so far."""
        return len(self._kept)

    def begin(
        self, tokens: Mapping[Handle, Array], *, expected: int | None = None, mode: Mode | None = None
    ) -> None:
        """Begin a step.

        Args:
            tokens: the new tokens of each request of the step.
            expected: hooks that should fire; None where that is not known.
            mode: why the step is made; None tells prefill from decode by the tokens.
        """
        self.end("the step before it did not end")
        modes = [self.requests[handle].extend(new) for handle, new in tokens.items() if len(new)]
        self._mode = mode or (Mode.DECODE if modes and set(modes) == {Mode.DECODE} else Mode.PREFILL)
        self._open = OpenStep(self.current, expected)

    def wants(self, layer: int) -> bool:
        """Whether the filters keep a call of this layer in the step that runs."""
        return self.filters.keeps(layer, self.current)

    def skip(self) -> None:
        """Count a launch that a filter left out."""
        step = self._running()
        step.fired += 1
        step.filtered += 1

    def observe(self, seen: Observation) -> None:
        """Keep a launch, or count it as filtered.

        A launch over KV that changed without a new generation is cut here: nobody knows which tokens its
        rows are made of.

        Raises:
            TracekitError: the launch breaks a rule; give the error to `fail`.
        """
        step = self._running()
        if not self.wants(seen.layer):
            self.skip()
            return
        token_ids = self._token_ids(seen)
        try:
            kv = {handle: self._kv(seen, handle, families) for handle, families in seen.kv.items()}
        except Unsupported as changed:
            self.fail(changed, f"layer {seen.layer}")
            return
        self._kept.append(Kept(self.current, self._mode, replace(seen, kv={}), token_ids, kv))
        step.fired += 1
        step.recorded += 1

    def observe_indexer(self, seen: IndexerObservation) -> None:
        """Keep a launch of a sparse indexer, where the filters keep its layer. The ledger counts attention.

        Raises:
            TracekitError: the launch breaks a rule, or its keys changed; give the error to `fail`.
        """
        self._running()
        if not self.wants(seen.layer):
            return
        token_ids = self._token_ids(seen)
        keys = {
            handle: self._kv(seen, handle, {KVFamily.INDEX: rows})[KVFamily.INDEX]
            for handle, rows in seen.keys.items()
        }
        self._kept_indexers.append(KeptIndexer(self.current, replace(seen, keys={}), token_ids, keys))

    def _token_ids(self, seen: Observation | IndexerObservation) -> npt.NDArray[np.int64]:
        token_ids = np.full(seen.positions.shape, -1, np.int64)
        for index, handle in enumerate(seen.requests):
            mine = seen.request == index
            token_ids[mine] = self.requests.tokens(handle, seen.positions[mine])
        return token_ids

    def _kv(
        self, seen: Observation | IndexerObservation, handle: Handle, families: Mapping[KVFamily, SeenKV]
    ) -> dict[KVFamily, Extent]:
        """Log the KV rows of one request of a launch.

        Raises:
            Unsupported: `R-KV-CHANGED` when they changed in one generation, now or in an earlier step.
        """
        request = self.requests[handle]
        name = f"request {request.alias or handle}"
        generation = max(rows.generation for rows in families.values())
        if request.lost is not None and generation <= request.lost.generation:
            raise Unsupported(
                f"{name} is not followed any more, as its KV changed at step {request.lost.step}.",
                rule="R-KV-CHANGED",
                request=handle,
                step=request.lost.step,
            )
        request.lost = None
        extents = {}
        for family, rows in families.items():
            log = self._logs.setdefault((handle, seen.layer, family), KVLog())
            try:
                extents[family] = log.observe(rows)
            except RowChanged as changed:
                mine = seen.positions[seen.request == seen.requests.index(handle)]
                request.lost = Lost(self.current, generation, int(mine.min(initial=len(request.tokens))))
                raise Unsupported(
                    f"KV row {changed.row} of {name} changed since it was last read: its cache was reordered "
                    "(beam search) or written over, and is not made of its tokens any more; the call is not "
                    "kept. Record one sequence a place (num_beams=1), or report a new generation.",
                    rule="R-KV-CHANGED",
                    request=handle,
                    row=changed.row,
                ) from None
        return extents

    def fail(self, error: Exception, where: str, *, fired: bool = True) -> None:
        """Note that a hook failed; the engine goes on.

        Args:
            error: what went wrong.
            where: the place, `layer 3`.
            fired: whether the hook of a launch failed (else the step as a whole).
        """
        text = f"{where}: {error}" if isinstance(error, TracekitError) else f"{where}: {error!r}"
        if self._open is None:
            self._open = OpenStep(self.current, None)
        self._open.fired += fired
        if self._open.cut(text):
            self.problems.append(f"step {self.current}, {text}")

    def end(self, cut: str = "") -> None:
        """End the step that runs, if one does."""
        if self._open is None:
            return
        if cut:
            self._open.cut(cut)
        told = len(self._open.reasons) - bool(cut)
        line = self._open.close()
        if len(self._open.reasons) > told:
            self.problems.append(f"step {line.step}: {self._open.reasons[-1]}")
        self._ledger.append(line)
        self._open = None

    def interrupt(self, reason: str) -> None:
        """The program ended before its recording did: the last step may lack calls."""
        self.notes["recording"] = reason
        if self._open is not None:
            self.end(reason)
        elif self._ledger:
            last = self._ledger[-1]
            self._ledger[-1] = replace(last, cut="; ".join(filter(None, [last.cut, reason])))

    def finish(self) -> tuple[Recording, list[AttentionCall]]:
        """Return the nouns. Requests get their keys, calls their rows of the KV log, and a derived LSE.

        Raises:
            Unsupported: `R-BYPASS` when steps ran and no hook fired in any of them; `R-NOTHING` when calls
                were seen and none of them could be kept.
            NothingSelected: `R-FILTER` when the filters left nothing.
        """
        self.end()
        requests = self.requests.resolve()
        calls = []
        for kept in self._kept:
            try:
                calls.append(self._call(kept))
            except TracekitError as error:
                self._lose(kept.step, kept.seen.layer, error, recorded=1)
        for one in self._kept_indexers:
            try:
                self.indexer_calls.append(self._indexer_call(one))
            except TracekitError as error:
                self._lose(one.step, one.seen.layer, error, recorded=0)
        if self._ledger and not calls:
            self._explain_nothing()
        self._tell_gradients()
        recording = Recording(self.identity, requests, tuple(self._ledger), dict(self.notes))
        return recording, calls

    def _tell_gradients(self) -> None:
        """Say which launches were to have gradients and lack some. Their forward is as good as any."""
        expected = [kept for kept in self._kept if kept.seen.gradients is not None]
        lost: dict[str, list[Kept]] = {}
        for kept in expected:
            late = kept.seen.gradients
            assert late is not None
            never = late.expected and late.d_out is None
            why = late.lost or ("their backward never ran" if never else "")
            if why:
                lost.setdefault(why, []).append(kept)
        if lost:
            told = [f"{len(calls)} of {len(expected)} calls, {why}" for why, calls in lost.items()]
            self.notes["gradients"] = f"missing of {'; '.join(told)}"
            self.problems.append(f"gradients are {self.notes['gradients']}")

    def _explain_nothing(self) -> None:
        """Steps ran and no call was kept: say which of the three reasons it is."""
        model = self.identity.architecture or "the model"
        steps = len(self._ledger)
        fired, filtered = (
            sum(getattr(line, name) for line in self._ledger) for name in ("fired", "filtered")
        )
        if fired and fired == filtered:
            raise NothingSelected(
                f"the filters leave none of the {filtered} calls of {steps} steps; widen layers= or steps=.",
                rule="R-FILTER",
            )
        if not fired:
            raise Unsupported(
                f"{model} ran {steps} steps and never called the attention interface: its attention bypasses "
                "it. Call session.attention(...) from the attention code, or set an implementation that "
                "dispatches through the interface.",
                rule="R-BYPASS",
                steps=steps,
                model=model,
            )
        raise Unsupported(
            f"{model}: none of {fired - filtered} calls in {steps} steps could be kept. "
            f"The first problem: {self.problems[0]}",
            rule="R-NOTHING",
            steps=steps,
            problems=self.problems,
        )

    def _call(self, kept: Kept) -> AttentionCall:
        seen = kept.seen
        rows = self._rows(seen, kept.token_ids)
        kv = {
            self.requests.key(handle): {family: extent.rows() for family, extent in families.items()}
            for handle, families in kept.kv.items()
        }
        call = AttentionCall(
            layer=seen.layer,
            step=kept.step,
            mode=kept.mode,
            rows=rows,
            q=seen.q,
            kv=kv,
            sink=seen.sink,
            selection=seen.selection,
            conventions=seen.conventions,
            provenance=seen.provenance,
            out=seen.out,
            lse=seen.lse,
            launch=seen.launch,
            rank=self.rank,
            grads=self._gradients(seen.gradients),
        )
        if call.lse is None and self._derive is not None:
            call = replace(call, lse=Output(self._derive(call), Origin.DERIVED))
        return call

    def _gradients(self, late: LateGradients | None) -> Gradients | None:
        if late is None or late.d_out is None:
            return None
        d_kv = {self.requests.key(handle): families for handle, families in late.d_kv.items()}
        return Gradients(late.d_out, late.d_q, d_kv, late.d_sink)

    def _indexer_call(self, kept: KeptIndexer) -> IndexerCall:
        seen = kept.seen
        keys = {self.requests.key(handle): extent.rows().keys for handle, extent in kept.keys.items()}
        return IndexerCall(
            layer=seen.layer,
            step=kept.step,
            rows=self._rows(seen, kept.token_ids),
            query=seen.query,
            weights=seen.weights,
            keys={key: bits.part((slice(None), 0)) for key, bits in keys.items()},
            top_k=seen.top_k,
            provenance=seen.provenance,
            k=seen.k,
            family=seen.family,
            scale_bits=seen.scale_bits,
            scores=seen.scores,
        )

    def _rows(self, seen: Observation | IndexerObservation, token_ids: npt.NDArray[np.int64]) -> Rows:
        requests = tuple(self.requests.key(handle) for handle in seen.requests)
        return Rows(requests, seen.request, seen.positions, token_ids)

    def _lose(self, step: int, layer: int, error: TracekitError, *, recorded: int) -> None:
        """A call that was seen but is not legal: take it off its ledger line, with the reason."""
        line = self._ledger[step]
        text = f"layer {layer}: {error}"
        cut = "; ".join(filter(None, [line.cut, text]))
        self._ledger[step] = replace(line, recorded=line.recorded - recorded, cut=cut)
        self.problems.append(f"step {step}, {text}")

    def _running(self) -> OpenStep:
        if self._open is None:
            self._open = OpenStep(self.current, None)
        return self._open
