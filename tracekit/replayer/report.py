"""What a replay came to: its verdicts, one status, one exit code."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tracekit.errors import TracekitError
from tracekit.gate.recorded import Judgement, Legality
from tracekit.verdict import ClaimId, Exit, Status, Verdict, exit_code, not_run, worst

_ORDER = (
    Status.REFUTED,
    Status.INCONCLUSIVE,
    Status.BOUNDED,
    Status.HELD,
    Status.OBSERVED_VARIES,
    Status.OBSERVED_SAME,
    Status.NOT_RUN,
    Status.NOT_APPLICABLE,
)


@dataclass(frozen=True)
class Report:
    """The verdicts of one replay.

    Args:
        verdicts: one a trace, provider and claim.
        named: the claims that were asked for by name.
        seed: the seed of the variants.
        errors: why traces could not be read to their end, as `told` says it.
        histories: of each trace that was replayed whole, whether its history was legal.
    """

    verdicts: tuple[Verdict, ...]
    named: frozenset[ClaimId] = frozenset()
    seed: int = 0
    errors: tuple[Mapping[str, Any], ...] = ()
    histories: tuple[tuple[str, Judgement], ...] = ()

    @property
    def illegal(self) -> bool:
        """Whether the history of a trace was not legal: what its calls read is then not what it says."""
        return any(judgement.status is Legality.ILLEGAL for _, judgement in self.histories)

    @property
    def status(self) -> Status:
        """The status that decides: refuted before inconclusive before a named claim that was not run.

        A trace that could not be read to its end is inconclusive at best.
        """
        seen = {verdict.status for verdict in self.verdicts}
        if self.illegal:
            return Status.REFUTED
        if self.errors and Status.REFUTED not in seen:
            return Status.INCONCLUSIVE
        if not seen & {Status.REFUTED, Status.INCONCLUSIVE} and any(
            not_run(verdict, self.named) for verdict in self.verdicts
        ):
            return Status.NOT_RUN
        return next((status for status in _ORDER if status in seen), Status.NOT_RUN)

    @property
    def exit_code(self) -> int:
        """What the command line ends with (docs/verdicts.md)."""
        codes = [error["exit_code"] for error in self.errors] + [Exit.REFUTED] * self.illegal
        return worst([exit_code(self.verdicts, self.named), *codes])

    @property
    def first(self) -> Verdict | None:
        """The first refuted verdict."""
        return next((verdict for verdict in self.verdicts if verdict.status is Status.REFUTED), None)

    def find(self, claim: ClaimId, provider: str | None = None) -> Verdict:
        """Return the first verdict on a claim.

        Raises:
            KeyError: there is none.
        """
        for verdict in self.verdicts:
            if verdict.claim == claim and provider in (None, verdict.provider):
                return verdict
        raise KeyError(f"no verdict on {claim}" + (f" about {provider}" if provider else ""))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "status": self.status.value,
            "exit_code": self.exit_code,
            "seed": self.seed,
            "named": sorted(self.named),
            "errors": [dict(error) for error in self.errors],
            "histories": {trace: judgement.to_dict() for trace, judgement in self.histories},
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
        }


def told(trace: str, error: TracekitError) -> dict[str, Any]:
    """Return an error as plain JSON types, with a message that names its trace."""
    text = str(error)
    return {
        **error.to_dict(),
        "message": text if trace in text else f"{trace}: {text}",
        "trace": trace,
        "exit_code": error.exit_code,
    }
