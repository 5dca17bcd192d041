"""What a replay came to: its verdicts, one status, one exit code."""

from dataclasses import dataclass
from typing import Any

from tracekit.verdict import ClaimId, Status, Verdict, exit_code

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
    """

    verdicts: tuple[Verdict, ...]
    named: frozenset[ClaimId] = frozenset()
    seed: int = 0

    @property
    def status(self) -> Status:
        """The status that decides: refuted before inconclusive before a named claim that was not run."""
        seen = {verdict.status for verdict in self.verdicts}
        if not seen & {Status.REFUTED, Status.INCONCLUSIVE} and any(
            verdict.status is Status.NOT_RUN and verdict.claim in self.named for verdict in self.verdicts
        ):
            return Status.NOT_RUN
        return next((status for status in _ORDER if status in seen), Status.NOT_RUN)

    @property
    def exit_code(self) -> int:
        """What the command line ends with (docs/verdicts.md)."""
        return exit_code(self.verdicts, self.named)

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
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
        }
