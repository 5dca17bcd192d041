"""`replay`: traces × kernels × claims -> verdicts."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from tracekit.env import check_timeout, settings
from tracekit.errors import ProviderFailed, TracekitError, Unavailable, UsageError
from tracekit.gate.recorded import Judgement, judge
from tracekit.gate.trace_launch import Launch
from tracekit.model import AttentionCall
from tracekit.providers import indexers as indexer_registry
from tracekit.providers import registry
from tracekit.providers.recorded_answer import RecordedAnswer
from tracekit.relations.base import on_kernel
from tracekit.relations.registry import relation
from tracekit.replayer.indexers import IndexerSession, indexers_of, judged
from tracekit.replayer.messages import Broken, Named, NamedIndexer
from tracekit.replayer.plan import TRACE, Planned, check_claims, judged_and_probed, providers_of
from tracekit.replayer.report import Report, told
from tracekit.replayer.session import Session
from tracekit.replayer.tally import Tally
from tracekit.replayer.trace import TraceLike, incomplete, name_of, select
from tracekit.replayer.worker import Worker
from tracekit.verdict import ClaimId, Status, Verdict

_KERNEL = (ProviderFailed, Unavailable, UsageError)
"""Errors of a kernel that cannot start: it would not start on the next trace either."""

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and what is under way."""


def replay(
    traces: Sequence[TraceLike],
    *,
    providers: Sequence[str] | None = None,
    claims: Sequence[ClaimId] | None = None,
    probe: bool = False,
    layers: Iterable[int] | None = None,
    requests: Iterable[str] | None = None,
    calls: Iterable[int] | None = None,
    seed: int = 0,
    threads: int = 0,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Prove, or refute, what kernels promise, on recorded calls.

    Args:
        traces: the traces.
        providers: kernels by name; without them `trace`, `tka1`, and the recorded kernel where the same
            one would run here; for calls of indexers `indexer-ref` and the recorded indexer.
        claims: claims to judge; without them those that each kernel promises.
        probe: also try the claims that a kernel does not promise; they are observed, not judged.
        layers: only calls of these layers.
        requests: only calls with rows of these requests (key, start of a key, or engine alias).
        calls: only these calls.
        seed: seed of the variants; the same seed gives the same ones.
        threads: threads of a kernel, 0 for its default; the claim `threads` varies them.
        timeout: seconds that a kernel may take for one launch; `TRACEKIT_TIMEOUT` where absent.
        progress: called before each call.

    Where a trace cannot be read to its end, what was found before is reported beside the error
    (`Report.errors`); it is raised only where nothing was found.

    Raises:
        NothingSelected: the filters leave no call of a trace.
        TraceCorrupt: as above.
        UsageError: a provider, a claim, or a part of a filter does not exist, no trace is given, or the
            timeout is out of range.
        Unavailable: a provider that was named needs something that is not installed; with claims by name
            they are *not run* instead.
        ProviderFailed: a provider that was named failed before it could run; with claims by name they are
            *inconclusive* instead.
    """
    if not traces:
        raise UsageError("no trace is given; a replay needs at least one.", rule="R-TRACES")
    check_claims(claims)
    kernels = None
    if providers is not None:
        kernels = [spec for spec in providers if spec not in indexer_registry.BUILTIN]
    for spec in kernels or ():
        registry.check(spec)
    limit = settings().timeout if timeout is None else check_timeout(timeout, "the timeout")
    wanted_layers = None if layers is None else list(layers)
    wanted_requests = None if requests is None else list(requests)
    wanted_calls = None if calls is None else list(calls)
    selected = [select(trace, wanted_layers, wanted_requests, wanted_calls) for trace in traces]
    verdicts: list[Verdict] = []
    errors: list[tuple[str, TracekitError]] = []
    histories: list[tuple[str, Judgement]] = []
    with ExitStack() as stack:
        desk = _Desk(stack, limit, claims, probe, seed, threads)
        total = sum(len(indices) for indices in selected)
        done = 0
        for trace, indices in zip(traces, selected, strict=True):
            name, cut = name_of(trace), ""
            sessions: list[Session] = []
            early: list[Verdict] = []
            indexers: list[IndexerSession] = []
            launches: list[Launch] = []
            try:
                for index in indices:
                    if progress is not None:
                        progress(done, total, f"{name} call {index}")
                    call = trace.call(index)
                    launches.append(Launch.of(call))
                    if index == indices[0]:
                        sessions, early = desk.sessions(trace, call, kernels)
                        indexers, sooner = desk.indexer_sessions(trace, providers)
                        early += sooner
                    for session in sessions:
                        session.visit(index, call)
                    _visit_indexers(trace, call, index, indexers)
                    done += 1
                cut = incomplete(trace, indices)
                if len(indices) == len(trace.heads):
                    histories.append((name, judge(trace.recording, launches)))
            except TracekitError as error:
                # What was found before stands: a refutation is no less one because the rest is damaged.
                errors.append((name, error))
                cut = "the trace could not be read to its end"
            for session in sessions:
                verdicts += [tally.verdict(name, seed, cut) for tally in session.tallies]
            for indexer in indexers:
                verdicts += [tally.verdict(name, seed, cut) for tally in indexer.tallies]
            verdicts += early
            if errors and not verdicts and isinstance(errors[-1][1], _KERNEL):
                break
        if errors and not verdicts:
            raise errors[0][1]
        if progress is not None:
            progress(done, total, "done")
    problems = tuple(told(*pair) for pair in errors)
    return Report(tuple(verdicts), frozenset(claims or ()), seed, problems, tuple(histories))


def _visit_indexers(
    trace: TraceLike, call: AttentionCall, index: int, sessions: list[IndexerSession]
) -> None:
    """Judge the indexer that chose for a call of attention: the one of its layer, step and rank."""
    if not sessions:
        return
    for head in getattr(trace, "indexer_heads", ()):
        if (head.layer, head.step, head.rank) == (call.layer, call.step, call.rank):
            indexer_call = trace.indexer_call(head.index)  # type: ignore[attr-defined]
            for session in sessions:
                session.visit(index, indexer_call)


class _Desk:
    """The child processes of one replay: one a kernel, one for all broken twins, kept from trace to trace."""

    def __init__(
        self,
        stack: ExitStack,
        timeout: float,
        claims: Sequence[ClaimId] | None,
        probe: bool,
        seed: int,
        threads: int,
    ) -> None:
        self._stack, self._timeout = stack, timeout
        self._claims, self._probe, self._seed, self._threads = claims, probe, seed, threads
        self._workers: dict[str, Worker] = {}
        self._controls = stack.enter_context(Worker(Broken(relation("control")), timeout))
        self._indexer_controls: Worker | None = None

    def sessions(
        self, trace: TraceLike, first: AttentionCall, asked: Sequence[str] | None
    ) -> tuple[list[Session], list[Verdict]]:
        """Return the kernels to run on a trace, and verdicts on those that cannot run here."""
        sessions, early, unfit = [], [], []
        for planned in providers_of(first, asked):
            try:
                sessions.append(self._session(planned, first))
            except _DoesNotFit as reason:
                unfit.append((planned, reason))
            except (Unavailable, ProviderFailed) as error:
                # Without a claim by name nobody knows what the kernel would have promised.
                if self._claims is None:
                    raise
                status = Status.NOT_RUN if isinstance(error, Unavailable) else Status.INCONCLUSIVE
                for claim in dict.fromkeys(self._claims):
                    early.append(self._early(trace, planned.provider, claim, str(error), status))
        tried = {tally.relation.id for session in sessions for tally in session.tallies}
        for planned, misfit in unfit:
            for claim in self._missed(planned, tried):
                failed = misfit.failed and not (planned.recorded and self._claims is None)
                status = Status.INCONCLUSIVE if failed else Status.NOT_RUN
                early.append(self._early(trace, planned.provider, claim, str(misfit), status))
        for session in sessions:
            named = set(self._claims or ()) - {tally.relation.id for tally in session.tallies}
            if session.worker is None and asked is not None:
                why = "the trace runs nothing: only `control` can be judged on what it recorded"
                early += [self._early(trace, TRACE, claim, why) for claim in sorted(named)]
        return [session for session in sessions if session.tallies], early

    def _missed(self, planned: Planned, tried: set[ClaimId]) -> list[ClaimId]:
        """Return the claims that are said to be not run where a kernel that nobody named does not fit.

        `recorded` is always one. Any other named claim is one on the kernel that promises it, and on the
        recorded kernel where no other kernel is tried: it would only have been a probe there.
        """
        if self._claims is None:
            return ["recorded"]
        named = dict.fromkeys(self._claims)
        return [claim for claim in named if claim == "recorded" or not planned.recorded or claim not in tried]

    def indexer_sessions(
        self, trace: TraceLike, asked: Sequence[str] | None
    ) -> tuple[list[IndexerSession], list[Verdict]]:
        """Return the indexers to run on a trace that holds calls of them, and verdicts on missing ones."""
        sessions: list[IndexerSession] = []
        early: list[Verdict] = []
        for name in indexers_of(getattr(trace, "indexer_heads", ()), asked):
            try:
                worker = self._workers.get(name)
                if worker is None:
                    worker = self._stack.enter_context(Worker(NamedIndexer(name), self._timeout))
                    worker.open()
                    self._workers[name] = worker
            except (Unavailable, ProviderFailed) as error:
                status = Status.NOT_RUN if isinstance(error, Unavailable) else Status.INCONCLUSIVE
                if asked is not None:
                    for claim in self._claims or ("rows", "chunks", "ties"):
                        early.append(self._early(trace, name, claim, str(error), status))
                continue
            assert worker.description is not None
            advertised = worker.description.advertised
            tallies = judged(name, advertised, self._claims, self._probe, asked is not None)
            if tallies:
                if self._indexer_controls is None:
                    twin = Worker(Broken(tallies[0].relation), self._timeout)
                    self._indexer_controls = self._stack.enter_context(twin)
                twins = self._indexer_controls
                sessions.append(IndexerSession(name, tallies, worker, twins, self._seed, self._threads))
        return sessions, early

    def _session(self, planned: Planned, first: AttentionCall) -> Session:
        if planned.provider == TRACE:
            answer = RecordedAnswer()
            chosen = judged_and_probed(planned, answer.advertised(), self._claims, probe=False)
            chosen = [(one, probed) for one, probed in chosen if one.id in answer.advertised()]
            tallies = [Tally(one, TRACE, probed) for one, probed in chosen]
            return Session(TRACE, tallies, None, self._controls, self._seed, self._threads, None)
        worker = self._worker(planned, first)
        assert worker.description is not None
        advertised = worker.description.advertised
        chosen = judged_and_probed(planned, advertised, self._claims, self._probe)
        capabilities = worker.description.capabilities
        assert capabilities is not None
        tallies = [Tally(on_kernel(one, capabilities), planned.provider, probed) for one, probed in chosen]
        return Session(
            planned.provider,
            tallies,
            worker,
            self._controls,
            self._seed,
            self._threads,
            capabilities,
        )

    def _worker(self, planned: Planned, call: AttentionCall) -> Worker:
        """Return the child of a kernel; of the recorded one only where it is what would run here."""
        name = planned.provider
        if planned.recorded and name not in registry.names():
            raise _DoesNotFit(f"no provider here runs the recorded kernel {name} again")
        worker = self._workers.get(name)
        try:
            if worker is None:
                worker = self._workers[name] = self._stack.enter_context(Worker(Named(name), self._timeout))
                worker.open()
            if planned.recorded:
                if reason := worker.refuses(call):
                    raise _DoesNotFit(reason)
                executed = worker.baseline(call, self._threads).executed
                if changes := call.provenance.executed.differences(executed):
                    raise _DoesNotFit(f"another kernel would run: {', '.join(changes)}")
            if worker.description is None:
                worker.open()
        except TracekitError as error:
            if planned.asked:
                raise
            raise _DoesNotFit(str(error), failed=isinstance(error, ProviderFailed)) from error
        return worker

    def _early(
        self,
        trace: TraceLike,
        provider: str,
        claim: ClaimId,
        reason: str,
        status: Status = Status.NOT_RUN,
    ) -> Verdict:
        """A verdict on a kernel that never came to run."""
        return Verdict(claim, provider, status, reason, trace=name_of(trace), seed=self._seed)


class _DoesNotFit(Exception):
    """A kernel that nobody asked for by name cannot run here, or stand for the recorded one."""

    def __init__(self, reason: str, *, failed: bool = False) -> None:
        super().__init__(reason)
        self.failed = failed
