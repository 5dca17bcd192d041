"""One kernel under a set of claims, call by call; answers come from child processes, judgement stays here."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tracekit.compare import (
    Comparison,
    Envelope,
    Roundings,
    compare_bits,
    compare_envelope,
    diagnose,
    envelope,
)
from tracekit.compare.hollow import hollow, hollow_gradients
from tracekit.errors import ProviderFailed, Unavailable, Unsupported, UsageError
from tracekit.model import AttentionCall, Bits, Conventions, LseBase, Origin, Output
from tracekit.providers.base import Capabilities, Launch
from tracekit.providers.recorded_answer import RecordedAnswer
from tracekit.relations.base import Expectation, Grounded, Relation, Rescheduled, subject_of
from tracekit.replayer.gradients import compare_gradients
from tracekit.replayer.messages import Answered, Broken, gather
from tracekit.replayer.tally import Tally
from tracekit.replayer.worker import Worker

CONTROL_ATTEMPTS = 4
"""Calls on which a twin may fail to be refuted before the claim is inconclusive: a call may be degenerate."""


@dataclass
class Session:
    """One kernel under its claims.

    Args:
        provider: the name by which it was asked for.
        tallies: one a claim.
        worker: the child in which the kernel runs; None for `trace`, which runs nothing.
        controls: the child in which broken twins run.
        seed: seed of the variants.
        threads: threads of the kernel, 0 for its default.
        capabilities: of the kernel; None for `trace`.
    """

    provider: str
    tallies: list[Tally[Relation]]
    worker: Worker | None
    controls: Worker
    seed: int
    threads: int
    capabilities: Capabilities | None
    _bounds: dict[Roundings, Envelope] = field(default_factory=dict)
    _judged: Answered | None = None
    _hollow: dict[int, tuple[Bits | Answered, str]] = field(default_factory=dict)

    def visit(self, index: int, call: AttentionCall) -> None:
        """Judge one call under every claim that still stands.

        Only a claim about the trace gets the recorded launch. A variant is a fresh launch, so what it is
        compared with must be one too, or it would also vary padding, layout and the kind of mask.
        """
        self._bounds, self._judged, self._hollow = {}, None, {}
        open_claims = [tally for tally in self.tallies if not tally.stopped]
        claims = [tally for tally in open_claims if self._concerns(tally, call)]
        fresh = call if call.launch is None else replace(call, launch=None)
        for traced, one in ((True, call), (False, fresh)):
            of_kind = [tally for tally in claims if (tally.relation.expects is Expectation.TRACE) is traced]
            self._visit(index, one, of_kind)

    def _visit(self, index: int, call: AttentionCall, claims: list[Tally[Relation]]) -> None:
        if not claims:
            return
        try:
            refusal = self.worker.refuses(call) if self.worker else RecordedAnswer().refuses(call)
        except ProviderFailed as error:
            for tally in claims:
                tally.failure = _failure(error, index)
            return
        if refusal:
            for tally in claims:
                reasons = tally.refused if self.worker or call.out is None else tally.no_evidence
                reasons[refusal] += 1
            return
        baseline = self._baseline(index, call, claims)
        for tally in claims:
            if tally.stopped:
                continue
            try:
                self._judge(tally, index, call, baseline)
            except ProviderFailed as error:
                tally.failure = _failure(error, index)
            except Unsupported as error:
                tally.refused[str(error)] += 1

    def _concerns(self, tally: Tally[Relation], call: AttentionCall) -> bool:
        """Whether a claim says something about a call, and the call can be evidence for it."""
        if reason := tally.relation.applies(call):
            tally.not_applicable[reason] += 1
            return False
        if tally.relation.expects is not Expectation.TRACE:
            return True
        if call.out is None:
            tally.no_output["the trace holds no output"] += 1
        elif call.out.origin is Origin.DERIVED:
            tally.no_evidence["a derived output is no evidence"] += 1
        elif call.launch is None and self.capabilities is not None and self.capabilities.launch_plan:
            tally.not_run["launch plan absent"] += 1
        else:
            return True
        return False

    def _baseline(self, index: int, call: AttentionCall, claims: list[Tally[Relation]]) -> Answered | None:
        """The call as it stands; a failure here is one of every claim that needs it."""
        needy = [tally for tally in claims if tally.relation.expects is not Expectation.TRACE]
        if not needy:
            return None
        try:
            if self.worker is not None:
                return self.worker.baseline(call, self.threads)
            launch = Launch((call,))
            return gather(launch, RecordedAnswer().run(launch))
        except ProviderFailed as error:
            for tally in needy:
                tally.failure = _failure(error, index)
        except Unsupported as error:
            for tally in needy:
                tally.refused[str(error)] += 1
        return None

    def _judge(
        self, tally: Tally[Relation], index: int, call: AttentionCall, baseline: Answered | None
    ) -> None:
        subject = subject_of(tally.relation, call)
        if subject is not call:
            assert self.worker is not None
            if refusal := self.worker.refuses(subject):
                raise Unsupported(refusal, rule="P-REFUSED")
            call, baseline = subject, self.worker.baseline(subject, self.threads)
        match tally.relation.expects:
            case Expectation.ENVELOPE if baseline is not None:
                self._judge_envelope(tally, index, call, baseline)
            case Expectation.BASELINE if baseline is not None:
                if isinstance(tally.relation, Grounded) and self.worker is not None:
                    baseline = self.worker.baseline(call, self.threads, tally.relation)
                expected = {"out": baseline.out, "lse": baseline.lse}
                self._judge_bits(tally, index, call, expected, baseline)
            case Expectation.TRACE:
                self._judge_bits(tally, index, call, recorded(call))
                baseline = self._judged
            case _:
                return
        judged = not tally.probed and tally.found.same and tally.found.compared.elements
        if judged and baseline is not None:
            self._control(tally, call, baseline)

    def _judge_bits(
        self,
        tally: Tally[Relation],
        index: int,
        call: AttentionCall,
        expected: Mapping[str, Bits | None],
        baseline: Answered | None = None,
    ) -> None:
        assert self.worker is not None
        covered = np.zeros(call.num_rows, np.bool_)
        if why := self._is_hollow(call, expected, baseline):
            tally.missing = tally.missing or f"{why}, call {index}: equal bits of it prove nothing"
        before = tally.variants
        for name, answered in self.worker.variants(call, tally.relation, self.seed, self.threads):
            if tally.relation.expects is Expectation.TRACE and _is_another(tally, call, answered):
                return
            if isinstance(tally.relation, Rescheduled):
                usual = None if baseline is None else baseline.schedule
                # What was asked for proves nothing; only what the kernel says that it did.
                tally.schedules[name] |= answered.schedule not in (None, usual)
                if answered.schedule in (None, usual):
                    continue
            comparison, rows = compare_answer(call, expected, answered)
            if baseline is not None:
                gradients, absent = compare_gradients(call, baseline, answered)
                comparison += gradients
                if absent and not tally.missing:
                    tally.missing = f"{absent} is missing in variant `{name}` of call {index}"
            covered[rows] = True
            self._judged = answered
            if expected.get("lse") is not None and answered.lse is None:
                tally.missing = tally.missing or f"the lse is missing in variant `{name}` of call {index}"
            tally.add(index, name, comparison, answered.executed)
        if tally.variants == before:
            if isinstance(tally.relation, Rescheduled) and usual is None:
                tally.no_evidence["the kernel does not say in which schedule it ran"] += 1
            else:
                tally.not_applicable["the call has no variant"] += 1
            return
        tally.calls += 1
        if not covered.all():
            row = call.rows.ids[int(np.argmin(covered))]
            tally.missing = tally.missing or (
                f"row {row.position} of request {row.request}, call {index}, is missing in every variant"
            )

    def _judge_envelope(
        self, tally: Tally[Relation], index: int, call: AttentionCall, baseline: Answered
    ) -> None:
        conventions = self._conventions(call)
        bound = self._bound(call)
        bounded = compare_envelope(call, bound, baseline.out, baseline.lse, conventions)
        named = None
        if bounded.outside.first is not None:
            named = diagnose(bound, baseline.out, baseline.lse, conventions)
        tally.calls += 1
        tally.add_bounded(index, call.num_rows, bounded, named, baseline.executed)

    def _control(self, tally: Tally[Relation], call: AttentionCall, judged: Answered) -> None:
        """Let the broken twin run on the same call: it must be refuted, or nothing is proven."""
        if tally.control_refuted or tally.control_attempts >= CONTROL_ATTEMPTS:
            return
        tally.control_attempts += 1
        twin = Broken(tally.relation)
        try:
            name = self.controls.open(twin).id
            if tally.relation.expects is Expectation.TRACE:
                refuted = self._drift_is_refuted(call, judged)
            elif reason := self.controls.refuses(call):
                tally.control = f"no negative control: {reason}"
                return
            else:
                refuted = self._twin_is_refuted(tally.relation, call, judged)
        except (ProviderFailed, Unsupported, Unavailable, UsageError) as error:
            tally.control = f"the negative control failed: {error}"
            return
        tally.control_refuted = refuted
        tally.control = f"{name} refuted" if refuted else f"the negative control {name} was not refuted"

    def _drift_is_refuted(self, call: AttentionCall, judged: Answered) -> bool:
        """Give the judged answer to the twin, which spoils it, and hold that against the trace."""
        places, rows = judged.aligned(call.rows)
        if rows.size != call.num_rows:
            return False
        out, lse = judged.out.take(places), judged.lse and judged.lse.take(places)
        answer = replace(
            call,
            out=Output(out, Origin.EXECUTED),
            lse=None if lse is None else Output(lse, Origin.EXECUTED),
        )
        wrong = self.controls.respond(answer)
        expected = {name: bits for name, bits in recorded(call).items() if bits is not None}
        return all(not compare_answer(call, {name: bits}, wrong)[0].same for name, bits in expected.items())

    def _twin_is_refuted(self, relation: Relation, call: AttentionCall, judged: Answered) -> bool:
        baseline = self.controls.baseline(call, self.threads, relation)
        if relation.expects is Expectation.ENVELOPE:
            # Only the tensors that were judged: a fault in an LSE proves nothing about O.
            lse = None if judged.lse is None else baseline.lse
            alone = [(baseline.out, None), (None, lse)] if lse is not None else [(baseline.out, None)]
            return all(
                compare_envelope(call, self._bound(call), out, one).outside.first is not None
                for out, one in alone
            )
        expected = {"out": baseline.out, "lse": baseline.lse}
        variants = self.controls.variants(call, relation, self.seed, self.threads)
        return any(
            not compare_answer(call, expected, answered)[0].same
            or not compare_gradients(call, baseline, answered)[0].same
            for _, answered in variants
        )

    def _is_hollow(
        self, call: AttentionCall, expected: Mapping[str, Bits | None], baseline: Answered | None
    ) -> str:
        """Asked once an answer, which is kept so that no other one gets its id."""
        out, lse = expected.get("out"), expected.get("lse")
        asked = out if baseline is None else baseline
        if asked is None or out is None:
            return ""
        if id(asked) not in self._hollow:
            why = hollow(call, out, lse)
            if baseline is not None and not why:
                why = hollow_gradients(call, baseline.d_q, baseline.d_kv, baseline.d_sink)
            self._hollow[id(asked)] = asked, why
        return self._hollow[id(asked)][1]

    def _bound(self, call: AttentionCall) -> Envelope:
        declared = call.conventions.score_dtype, call.conventions.probability_dtype
        roundings = Roundings(*(self.worker.roundings(call) if self.worker else declared))
        if roundings not in self._bounds:
            self._bounds[roundings] = envelope(call, roundings)
        return self._bounds[roundings]

    def _conventions(self, call: AttentionCall) -> Conventions:
        """What the LSE of an answer means: as declared in the trace, else natural and without the sink."""
        return call.conventions if self.worker is None else Conventions(call.conventions.scale_bits)


def recorded(call: AttentionCall) -> dict[str, Bits | None]:
    """Return the executed outputs of a call; the LSE only where it means what a provider gives."""
    assert call.out is not None
    means = call.conventions
    same = means.lse_base is LseBase.NATURAL and not (means.sink_in_lse and call.sink is not None)
    lse = call.lse if call.lse is not None and call.lse.origin is Origin.EXECUTED and same else None
    return {"out": call.out.bits, "lse": None if lse is None else lse.bits}


def compare_answer(
    call: AttentionCall, expected: Mapping[str, Bits | None], answered: Answered
) -> tuple[Comparison, "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"]:
    """Compare answers with what was expected, row by row; also return the rows that were answered."""
    places, rows = answered.aligned(call.rows)
    pairs = {
        name: (wanted.take(rows), given.take(places))
        for name, given in (("out", answered.out), ("lse", answered.lse))
        if given is not None and (wanted := expected.get(name)) is not None
    }
    return compare_bits(pairs, call.rows, call.layer, rows), rows


def _failure(error: ProviderFailed, index: int) -> str:
    return f"call {index}: {error}"


def _is_another(tally: Tally[Relation], call: AttentionCall, answered: Answered) -> bool:
    """Whether something else answered than what the trace recorded; says so in the tally.

    Another kernel has nothing to do with the claim; the same kernel in another build could not be tested.
    """
    there, here = call.provenance.executed, answered.executed
    if there.kernel != here.kernel:
        tally.not_applicable[f"the recorded answers are those of {there.kernel}, not of {here.kernel}"] += 1
        return True
    changes = there.differences(here)
    if changes:
        tally.not_run[f"another build answered: {', '.join(changes)}"] += 1
    return bool(changes)
