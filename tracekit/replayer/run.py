"""`replay`: traces × kernels × claims -> verdicts."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from threading import Event, Lock
from typing import NamedTuple

from tracekit.env import check_threads, check_timeout, settings, usable_cores
from tracekit.errors import ProviderFailed, TracekitError, Unavailable, UsageError
from tracekit.gate.recorded import Judgement, judge
from tracekit.gate.trace_launch import Launch
from tracekit.model import AttentionCall
from tracekit.providers import indexers as indexer_registry
from tracekit.providers import registry
from tracekit.replayer.desk import Desk
from tracekit.replayer.indexers import IndexerSession
from tracekit.replayer.plan import check_claims
from tracekit.replayer.report import Report, told
from tracekit.replayer.session import Session
from tracekit.replayer.side_by_side import side_by_side
from tracekit.replayer.trace import TraceLike, incomplete, name_of, select
from tracekit.verdict import ClaimId, Verdict

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
    jobs: int | None = None,
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
        jobs: traces replayed at a time, each with children of its own; None takes the cores that this process
            may use. Verdicts have the order of the traces whatever it is.
        progress: called before each call, by one thread at a time.

    Where a trace cannot be read to its end, what was found before is reported beside the error
    (`Report.errors`); it is raised only where nothing was found.

    Raises:
        NothingSelected: the filters leave no call of a trace.
        TraceCorrupt: as above.
        UsageError: a provider, a claim, or a part of a filter does not exist, no trace is given, a list is
            empty, or the timeout or the number of threads is out of range.
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
        if not providers:
            raise UsageError("no kernel is named; leave the list out for the defaults.", rule="R-NONE")
        kernels = [spec for spec in providers if spec not in indexer_registry.BUILTIN]
    for spec in kernels or ():
        registry.check(spec)
    check_threads(threads, "the number of threads")
    limit = settings().timeout if timeout is None else check_timeout(timeout, "the timeout")
    wanted_layers = None if layers is None else list(layers)
    wanted_requests = None if requests is None else list(requests)
    wanted_calls = None if calls is None else list(calls)
    selected = [select(trace, wanted_layers, wanted_requests, wanted_calls) for trace in traces]
    verdicts: list[Verdict] = []
    errors: list[tuple[str, TracekitError]] = []
    histories: list[tuple[str, Judgement]] = []
    tell = _Telling(progress, sum(len(indices) for indices in selected))
    tasks = [
        partial(_one, trace, indices, kernels, providers, seed, tell)
        for trace, indices in zip(traces, selected, strict=True)
    ]

    def desk_of(stack: ExitStack, halted: Event) -> Desk:
        return Desk(stack, limit, claims, probe, seed, threads, halted)

    with side_by_side(tasks, desk_of, _jobs(jobs, traces)) as outcomes:
        for outcome in outcomes:
            verdicts += outcome.verdicts
            histories += outcome.histories
            errors += outcome.errors
            if outcome.errors and not verdicts and isinstance(errors[-1][1], _KERNEL):
                break
    if errors and not verdicts:
        raise errors[0][1]
    tell.done()
    problems = tuple(told(*pair) for pair in errors)
    return Report(tuple(verdicts), frozenset(claims or ()), seed, problems, tuple(histories))


class _Outcome(NamedTuple):
    """What came of one trace; errors and histories are one at most, with the name of the trace."""

    verdicts: list[Verdict]
    errors: list[tuple[str, TracekitError]]
    histories: list[tuple[str, Judgement]]


def _one(
    trace: TraceLike,
    indices: Sequence[int],
    kernels: Sequence[str] | None,
    providers: Sequence[str] | None,
    seed: int,
    tell: "_Telling",
    desk: Desk,
) -> _Outcome:
    """Replay one trace."""
    name, cut = name_of(trace), ""
    found = _Outcome([], [], [])
    sessions: list[Session] = []
    early: list[Verdict] = []
    indexers: list[IndexerSession] = []
    launches: list[Launch] = []
    try:
        whole = len(indices) == len(trace.heads)
        for index in indices:
            tell.about(f"{name} call {index}")
            call = trace.call(index)
            if whole:  # part of a history is none that could be judged
                launches.append(Launch.of(call))
            if index == indices[0]:
                sessions, early = desk.sessions(trace, _of_each_kernel(trace, indices, call), kernels)
                indexers, sooner = desk.indexer_sessions(trace, providers)
                early += sooner
            for session in sessions:
                session.visit(index, call)
            _visit_indexers(trace, call, index, indexers)
            tell.step()
        cut = incomplete(trace, indices)
        if whole:
            found.histories.append((name, judge(trace.recording, launches)))
    except TracekitError as error:
        # What was found before stands: a refutation is no less one because the rest is damaged.
        found.errors.append((name, error))
        cut = "the trace could not be read to its end"
    for session in sessions:
        found.verdicts.extend(tally.verdict(name, seed, cut) for tally in session.tallies)
    for indexer in indexers:
        found.verdicts.extend(tally.verdict(name, seed, cut) for tally in indexer.tallies)
    found.verdicts.extend(early)
    return found


class _Telling:
    """Progress over all traces, one thread at a time."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._steps = progress, total, 0
        self._turn = Lock()

    def about(self, text: str) -> None:
        """Say what is under way."""
        if self._progress is not None:
            with self._turn:
                self._progress(self._steps, self._total, text)

    def step(self) -> None:
        """Count a call."""
        with self._turn:
            self._steps += 1

    def done(self) -> None:
        """Say that nothing is left."""
        self.about("done")


def _jobs(asked: int | None, traces: Sequence[TraceLike]) -> int:
    """How many traces are replayed at a time; a trace that is given twice is read by one thread only.

    Raises:
        UsageError: `R-JOBS` when less than one is asked for.
    """
    if asked is not None and asked < 1:
        raise UsageError(f"{asked} jobs replay nothing; give 1 or more, or none.", rule="R-JOBS", jobs=asked)
    if len({id(trace) for trace in traces}) < len(traces):
        return 1
    return min(usable_cores() if asked is None else asked, len(traces))


def _of_each_kernel(trace: TraceLike, indices: Sequence[int], first: AttentionCall) -> list[AttentionCall]:
    """Return the first of the selected calls of each recorded kernel, in the order of the trace."""
    heads, found = trace.heads, {first.provenance.executed.kernel: first}
    for index in indices:
        kernel = getattr(heads[index], "kernel", first.provenance.executed.kernel)
        if kernel not in found:
            with suppress(TracekitError):  # told when its turn comes, after what is found before it
                found[kernel] = trace.call(index)
    return list(found.values())


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
