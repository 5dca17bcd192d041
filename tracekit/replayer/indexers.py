"""One indexer under its claims, call by call; as `session`, for the other kind of kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracekit.compare import Comparison, compare_bits
from tracekit.errors import ProviderFailed, Unsupported
from tracekit.model import IndexerCall
from tracekit.providers import indexers as registry
from tracekit.relations.indexers import IndexerRelation, claims
from tracekit.replayer.messages import Answered, Broken
from tracekit.replayer.tally import Tally
from tracekit.replayer.worker import Worker
from tracekit.verdict import ClaimId

CONTROL_ATTEMPTS = 4


@dataclass
class IndexerSession:
    """One indexer and its claims.

    Args:
        provider: the name by which it was asked for.
        tallies: one a claim.
        worker: the child in which it runs.
        controls: the child in which broken twins run.
        seed: seed of the variants.
        threads: threads of the kernel, 0 for its default.
    """

    provider: str
    tallies: list[Tally[IndexerRelation]]
    worker: Worker
    controls: Worker
    seed: int
    threads: int

    def visit(self, index: int, call: IndexerCall) -> None:
        """Judge one call under every claim that still stands; `index` is the call of its attention."""
        for tally in self.tallies:
            relation = tally.relation
            if tally.stopped:
                continue
            if reason := relation.applies(call):
                tally.not_applicable[reason] += 1
                continue
            try:
                if refusal := self.worker.refuses(call):
                    tally.refused[refusal] += 1
                    continue
                for subject in relation.subjects(call):
                    self._judge(tally, index, subject)
                tally.calls += 1
                if not tally.probed and tally.found.same:
                    self._control(tally, call)
            except ProviderFailed as error:
                tally.failure = f"call {index}: {error}"
            except Unsupported as error:
                tally.refused[str(error)] += 1

    def _judge(self, tally: Tally[IndexerRelation], index: int, subject: IndexerCall) -> None:
        baseline = self.worker.baseline(subject, self.threads)
        for name, answered in self.worker.variants(subject, tally.relation, self.seed, self.threads):
            tally.add(index, name, _compare(subject, baseline, answered), answered.executed)

    def _control(self, tally: Tally[IndexerRelation], call: IndexerCall) -> None:
        if tally.control_refuted or tally.control_attempts >= CONTROL_ATTEMPTS:
            return
        tally.control_attempts += 1
        relation = tally.relation
        try:
            for subject in relation.subjects(call):
                name = self.controls.open(Broken(relation)).id
                baseline = self.controls.baseline(subject, self.threads)
                variants = self.controls.variants(subject, relation, self.seed, self.threads)
                if any(not _compare(subject, baseline, answered).same for _, answered in variants):
                    tally.control_refuted, tally.control = True, f"{name} refuted"
                    return
            tally.control = f"the negative control {name} was not refuted"
        except (ProviderFailed, Unsupported) as error:
            tally.control = f"the negative control failed: {error}"


def judged(
    name: str, advertised: frozenset[ClaimId], named: Sequence[ClaimId] | None, probe: bool, asked: bool
) -> list[Tally[IndexerRelation]]:
    """Return the claims to try on an indexer; the rule is that of `plan.judged_and_probed`."""
    tallies = []
    for claim, make in claims().items():
        promised = claim in advertised
        if (claim in named) if named is not None else (promised or probe):
            probed = not promised and not (asked and named is not None)
            tallies.append(Tally(make(), name, probed))
    return tallies


def indexers_of(heads: Sequence[Any], asked: Sequence[str] | None) -> list[str]:
    """Return the indexers to run on a trace: those asked for, else the reference and the recorded one."""
    if not heads:
        return []
    if asked is not None:
        return [name for name in dict.fromkeys(asked) if name in registry.BUILTIN]
    recorded = {registry.KERNELS[head.kernel] for head in heads if head.kernel in registry.KERNELS}
    return [registry.REFERENCE, *sorted(recorded)]


def _compare(call: IndexerCall, expected: Answered, answered: Answered) -> Comparison:
    mine, rows = expected.aligned(call.rows)
    places, given = answered.aligned(call.rows)
    if rows.tolist() != given.tolist():
        raise ProviderFailed("a variant does not hold every row of its call.", rule="P-ANSWER")
    pairs = {"top_k": (expected.out.take(mine), answered.out.take(places))}
    if expected.lse is not None and answered.lse is not None:
        pairs["scores"] = (expected.lse.take(mine), answered.lse.take(places))
    return compare_bits(pairs, call.rows, call.layer, rows)
