"""Which claims are tried on which kernel: judged where named or promised, else probed or left out."""

from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.errors import UsageError
from tracekit.model import AttentionCall
from tracekit.providers import registry
from tracekit.relations import indexers
from tracekit.relations.base import Relation
from tracekit.relations.registry import claims as known_claims
from tracekit.relations.registry import relation
from tracekit.verdict import ClaimId

TRACE = "trace"
PORTABLE = "tka1"


@dataclass(frozen=True)
class Planned:
    """One kernel of a replay.

    Args:
        provider: its name.
        asked: whether the user named it; else it is left out where it does not fit.
        recorded: whether it stands for a kernel of the trace, and runs only where that is what would run.
        first: the call on which that is found out.
    """

    provider: str
    asked: bool
    recorded: bool = False
    first: AttentionCall | None = None


def providers_of(firsts: Sequence[AttentionCall], asked: Sequence[str] | None) -> list[Planned]:
    """Return the kernels to run on a trace: those asked for, else `trace`, `tka1` and the recorded ones.

    Args:
        firsts: a call of each kernel that was recorded.
        asked: what the user named, or None.

    Raises:
        UsageError: a name is unknown.
    """
    if asked is not None:
        for spec in asked:
            registry.check(spec)
        return [Planned(spec, asked=True) for spec in dict.fromkeys(asked)]
    planned = {name: Planned(name, asked=False) for name in (TRACE, PORTABLE)}
    for call in firsts:
        kernel = call.provenance.executed.kernel
        name = registry.for_kernel(kernel) or kernel
        planned.setdefault(name, Planned(name, asked=False, recorded=True, first=call))
    return list(planned.values())


def judged_and_probed(
    planned: Planned, advertised: frozenset[ClaimId], named: Sequence[ClaimId] | None, probe: bool
) -> list[tuple[Relation, bool]]:
    """Return relations and whether each is only probed, in the order of reports.

    A claim is judged where it was promised, or where the user named both it and the kernel. A named claim on
    a kernel that nobody named and that never made it is probed: nobody is accused for a promise of another.
    """
    chosen = []
    for claim in known_claims():
        promised = claim in advertised
        wanted = claim in named if named is not None else promised or (probe and claim != "recorded")
        if wanted:
            chosen.append((relation(claim), not promised and not (planned.asked and named is not None)))
    return chosen


def check_claims(named: Sequence[ClaimId] | None) -> None:
    """Refuse claims that do not exist.

    Raises:
        UsageError: `R-UNKNOWN`, or `R-NONE` for an empty list.
    """
    if named is not None and not named:
        raise UsageError("no claim is named; leave the list out to judge what is promised.", rule="R-NONE")
    for claim in named or ():
        if claim not in indexers.claims():
            relation(claim)
