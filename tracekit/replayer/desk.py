"""The child processes of one replay, and which of them run on a trace."""

from collections.abc import Sequence
from contextlib import ExitStack
from threading import Event

from tracekit.errors import ProviderFailed, TracekitError, Unavailable
from tracekit.model import AttentionCall
from tracekit.providers import registry
from tracekit.providers.engines import need
from tracekit.providers.recorded_answer import RecordedAnswer
from tracekit.relations.base import on_kernel
from tracekit.relations.registry import relation
from tracekit.replayer.indexers import IndexerSession, indexers_of, judged
from tracekit.replayer.messages import Broken, Named, NamedIndexer, Source
from tracekit.replayer.plan import TRACE, Planned, judged_and_probed, providers_of
from tracekit.replayer.session import Session
from tracekit.replayer.tally import Tally
from tracekit.replayer.trace import TraceLike, name_of
from tracekit.replayer.worker import Worker
from tracekit.verdict import ClaimId, Status, Verdict


class Desk:
    """The child processes of one replay: one a kernel, one for all broken twins, kept from trace to trace."""

    def __init__(
        self,
        stack: ExitStack,
        timeout: float,
        claims: Sequence[ClaimId] | None,
        probe: bool,
        seed: int,
        threads: int,
        halted: Event,
    ) -> None:
        self._stack, self._timeout, self._halted = stack, timeout, halted
        self._claims, self._probe, self._seed, self._threads = claims, probe, seed, threads
        self._all: list[Worker] = []
        self._workers: dict[str, Worker] = {}
        self._controls = self._employ(Broken(relation("control")))
        self._indexer_controls: Worker | None = None

    def kill(self) -> None:
        """End the children at once, from another thread; they start again unless the replay is halted."""
        for worker in list(self._all):
            worker.kill()

    def _employ(self, source: Source) -> Worker:
        """A worker that is closed with the desk."""
        worker = self._stack.enter_context(Worker(source, self._timeout, self._halted))
        self._all.append(worker)
        return worker

    def sessions(
        self, trace: TraceLike, firsts: Sequence[AttentionCall], asked: Sequence[str] | None
    ) -> tuple[list[Session], list[Verdict]]:
        """Return the kernels to run on a trace, and verdicts on those that cannot run here.

        Args:
            trace: the trace.
            firsts: a call of each kernel that was recorded.
            asked: the kernels that the user named.
        """
        sessions, early, unfit = [], [], []
        for planned in providers_of(firsts, asked):
            try:
                sessions.append(self._session(planned))
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
                    need(name)
                    worker = self._employ(NamedIndexer(name))
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
                    self._indexer_controls = self._employ(Broken(tallies[0].relation))
                twins = self._indexer_controls
                sessions.append(IndexerSession(name, tallies, worker, twins, self._seed, self._threads))
        return sessions, early

    def _session(self, planned: Planned) -> Session:
        if planned.provider == TRACE:
            answer = RecordedAnswer()
            chosen = judged_and_probed(planned, answer.advertised(), self._claims, probe=False)
            chosen = [(one, probed) for one, probed in chosen if one.id in answer.advertised()]
            tallies = [Tally(one, TRACE, probed) for one, probed in chosen]
            return Session(TRACE, tallies, None, self._controls, self._seed, self._threads, None)
        worker = self._worker(planned)
        assert worker.description is not None
        advertised = worker.description.advertised
        chosen = judged_and_probed(planned, advertised, self._claims, self._probe)
        capabilities = worker.description.capabilities
        assert capabilities is not None
        tallies = [
            Tally(on_kernel(one, capabilities), planned.provider, probed, capabilities.reads_pages)
            for one, probed in chosen
        ]
        return Session(
            planned.provider,
            tallies,
            worker,
            self._controls,
            self._seed,
            self._threads,
            capabilities,
        )

    def _worker(self, planned: Planned) -> Worker:
        """Return the child of a kernel; of the recorded one only where it is what would run here."""
        name, call = planned.provider, planned.first
        if planned.recorded and name not in registry.names():
            raise _DoesNotFit(f"no provider here runs the recorded kernel {name} again")
        worker = self._workers.get(name)
        try:
            if worker is None:
                need(name)
                worker = self._workers[name] = self._employ(Named(name))
            if worker.description is None:  # it is new, or could not be made for the trace before this one
                worker.open()
            if call is not None:
                if reason := worker.refuses(call):
                    raise _DoesNotFit(reason)
                executed = worker.baseline(call, self._threads).executed
                if changes := call.provenance.executed.differences(executed):
                    raise _DoesNotFit(f"another kernel would run: {', '.join(changes)}")
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
