"""What was seen of one claim about one kernel, over all calls of a trace, and the verdict that follows."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tracekit.compare import Bounded, Comparison
from tracekit.model import ExecutedIdentity
from tracekit.providers import registry
from tracekit.relations.base import Expectation, Relation
from tracekit.relations.indexers import IndexerRelation
from tracekit.verdict import Status, Verdict

_OF_PAGES = frozenset({"page-ids", "page-size", "layout"})
"""Claims about pages alone."""

R = TypeVar("R", bound=Relation | IndexerRelation)


@dataclass
class Tally(Generic[R]):
    """Evidence about one claim.

    Args:
        relation: the claim.
        provider: the kernel.
        probed: whether the kernel never made the claim.
        reads_pages: whether the kernel reads pages itself, as its capabilities say.
    """

    relation: R
    provider: str
    probed: bool
    reads_pages: bool = True
    calls: int = 0
    variants: int = 0
    found: Comparison = field(default_factory=Comparison)
    shown: Comparison = field(default_factory=Comparison)
    worst: float = 0.0
    rows: int = 0
    skipped_rows: int = 0
    first_call: int = 0
    first_variant: str = ""
    diagnosis: str = ""
    failure: str = ""
    missing: str = ""
    control: str = ""
    control_refuted: bool = False
    control_attempts: int = 0
    executed: ExecutedIdentity | None = None
    not_applicable: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    no_evidence: Counter[str] = field(default_factory=Counter)
    no_output: Counter[str] = field(default_factory=Counter)
    not_run: Counter[str] = field(default_factory=Counter)
    schedules: defaultdict[str, bool] = field(default_factory=lambda: defaultdict(bool))

    @property
    def stopped(self) -> bool:
        """Whether the kernel failed under this claim: it is not tried on further calls."""
        return bool(self.failure)

    def add(self, call: int, variant: str, comparison: Comparison, executed: ExecutedIdentity) -> None:
        """Take in the comparison of one variant."""
        self.variants += 1
        self.executed = executed
        if self.found.first is None and comparison.first is not None:
            self.first_call, self.first_variant = call, variant
        self.found += comparison

    def add_bounded(
        self, call: int, rows: int, bounded: Bounded, diagnosis: str | None, executed: ExecutedIdentity
    ) -> None:
        """Take in a comparison of so many rows with the envelope."""
        self.add(call, "as recorded", bounded.outside, executed)
        self.shown += bounded.inside
        self.worst = max(self.worst, bounded.worst)
        self.rows += rows
        self.skipped_rows += bounded.skipped
        self.diagnosis = self.diagnosis or diagnosis or ""

    def verdict(self, trace: str, seed: int, incomplete: str) -> Verdict:
        """Say what the evidence amounts to.

        Args:
            trace: name of the trace.
            seed: the seed of the variants.
            incomplete: why the capture is incomplete, or an empty text.
        """
        status, reason = self._judge(incomplete)
        reason = "; ".join(filter(None, (reason, registry.label(self.provider))))
        bounded = self.relation.expects is Expectation.ENVELOPE and status is not Status.REFUTED
        again = status in (Status.REFUTED, Status.OBSERVED_VARIES)
        return Verdict(
            claim=self.relation.id,
            provider=self.provider,
            status=status,
            reason=reason,
            trace=trace,
            calls=self.calls,
            variants=self.variants,
            compared=self.found.compared,
            differences=(self.shown if bounded and not again else self.found).differences,
            first=self.found.first,
            variant=self.first_variant,
            control=self.control,
            next_command=f"tracekit replay {trace} --provider {self.provider} --claim {self.relation.id} "
            f"--calls {self.first_call} --seed {seed}"
            if again
            else "",
            seed=seed,
            executed=described(self.executed),
            left_out=sum(self._unjudged().values()),
        )

    def _judge(self, incomplete: str) -> tuple[Status, str]:
        if self.found.first is not None:
            return Status.OBSERVED_VARIES if self.probed else Status.REFUTED, self._difference()
        if self.failure:
            # A probe never changes the exit code, not even by a kernel that fails under it.
            return Status.NOT_RUN if self.probed else Status.INCONCLUSIVE, self.failure
        if self.found.compared.elements == 0:
            return self._nothing()
        if self.missing:
            return Status.NOT_RUN if self.probed else Status.INCONCLUSIVE, self.missing
        if self.probed:
            return Status.OBSERVED_SAME, self._same()
        if 2 * self.skipped_rows > self.rows:
            return Status.INCONCLUSIVE, f"{self._no_bound()}; too few were judged"
        if not self.control_refuted:
            return Status.INCONCLUSIVE, self.control or "no negative control ran"
        if incomplete:
            return Status.INCONCLUSIVE, f"{incomplete}; what was recorded {self._same()}"
        if self.relation.expects is Expectation.ENVELOPE:
            return Status.BOUNDED, self._same()
        return Status.HELD, self._same()

    def _nothing(self) -> tuple[Status, str]:
        """The status of a claim for which no element was compared."""
        for status, reasons in (
            (Status.INCONCLUSIVE, self.no_evidence),
            (Status.NOT_RUN, self.not_run),
            (Status.NOT_RUN, self.refused),
            (Status.NOT_APPLICABLE, self.not_applicable + self.no_output),
        ):
            if reasons:
                return status, _counted(reasons)
        if self.skipped_rows:
            return Status.INCONCLUSIVE, f"none of {self.skipped_rows} rows has a usable bound"
        return Status.INCONCLUSIVE, "nothing was compared"

    def _same(self) -> str:
        if self.relation.expects is Expectation.ENVELOPE:
            text = f"inside the envelope, largest error {self.worst:.0%} of its bound"
            if self.skipped_rows:
                text += f"; {self._no_bound()}"
        else:
            text = f"same bits in {_many(self.variants, 'variant')} of {_many(self.calls, 'call')}"
            if self.relation.id in _OF_PAGES and not self.reads_pages:
                text += ", of canonicaliser and kernel together: the kernel reads no pages itself"
            if never := [name for name, ran in self.schedules.items() if not ran]:
                text += f"; could not be run: {', '.join(never)}"
        return text + self._left_out()

    def _no_bound(self) -> str:
        return f"no usable bound for {self.skipped_rows:,} of {_many(self.rows, 'row')}"

    def _difference(self) -> str:
        seen, compared = self.found.differences, self.found.compared
        if self.relation.expects is Expectation.ENVELOPE:
            text = (
                f"{seen.elements:,} of {compared.elements:,} values in {seen.rows:,} rows "
                "lie outside the envelope"
            )
            if self.diagnosis:
                text += f"; {self.diagnosis}"
        else:
            text = (
                f"{seen.elements:,} of {compared.elements:,} values in {seen.rows:,} rows differ, "
                f"up to {seen.max_ulps:,} ULP; first in variant `{self.first_variant}`"
            )
        return text + (f"; then {self.failure}" if self.failure else "") + self._left_out()

    def _left_out(self) -> str:
        left = self._unjudged()
        return f"; left out: {_counted(left)}" if left else ""

    def _unjudged(self) -> Counter[str]:
        """Calls of which the claim speaks and on which it was not run, or could not be judged.

        A call without an output says nothing of bits that come again; beside calls that have one it is a gap.
        """
        left = self.not_run + self.refused
        if self.calls:
            left += self.no_evidence + self.no_output
        return left


def described(identity: ExecutedIdentity | None) -> dict[str, str]:
    """Return an identity as text by name."""
    if identity is None:
        return {}
    # One that names nothing but itself is that of a definition, whose bits are those of any device.
    device = {} if set(identity.libraries) == {identity.kernel} else {"device": identity.device}
    parts = {"kernel": identity.kernel, **identity.libraries, **device}
    return parts | {name: text for name, text in (("arch", identity.arch), ("isa", identity.isa)) if text}


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _counted(reasons: Counter[str]) -> str:
    (first, count), *_ = reasons.most_common(1)
    total = sum(reasons.values())
    if total == 1:
        return first
    return f"{first} ({count} of {total} calls)" if count < total else f"{first} ({total} calls)"
