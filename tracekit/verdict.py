"""Claims, statuses, verdicts and exit codes: what is said after a comparison, and nothing more."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

ClaimId = str


class Status(StrEnum):
    """What a claim came to. Only `HELD` and `BOUNDED` are good news; the rest says why not."""

    HELD = "held"
    BOUNDED = "bounded"
    REFUTED = "refuted"
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not applicable"
    NOT_RUN = "not run"
    OBSERVED_SAME = "observed same"
    OBSERVED_VARIES = "observed varies"


EVIDENCE = frozenset(
    {Status.HELD, Status.BOUNDED, Status.REFUTED, Status.OBSERVED_SAME, Status.OBSERVED_VARIES}
)
"""Statuses that speak of compared elements, and so need some."""

PROBED = frozenset({Status.OBSERVED_SAME, Status.OBSERVED_VARIES})
"""Statuses of claims that the kernel never made; they never change the exit code."""


@dataclass(frozen=True)
class Compared:
    """How much was compared."""

    tensors: int = 0
    elements: int = 0
    rows: int = 0

    def __add__(self, other: "Compared") -> "Compared":
        return Compared(self.tensors + other.tensors, self.elements + other.elements, self.rows + other.rows)


@dataclass(frozen=True)
class Place:
    """The place of one element, in logical coordinates, with what stood there.

    `expected_bits` and `actual_bits` are hexadecimal, `0x3f80`; the values are their decimal reading.
    """

    request: str
    position: int
    layer: int
    head: int
    element: int | None
    tensor: str
    expected_bits: str
    actual_bits: str
    expected: float
    actual: float
    ulps: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; JSON has no NaN and no infinity, so those are words."""
        record = asdict(self)
        for name in ("expected", "actual"):
            if not math.isfinite(record[name]):
                record[name] = str(record[name])
        return record


@dataclass(frozen=True)
class Differences:
    """How many elements and rows differ, and by how much.

    `ulps` maps a class ("0", "1", "2-3", "4-7", ..., "nan", "inf", "sign of zero") to a count.
    """

    elements: int = 0
    rows: int = 0
    max_ulps: int = 0
    ulps: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """One claim about one kernel on one trace.

    `left_out` counts the selected calls on which the claim was not run.

    Raises:
        ValueError: the status speaks of compared elements, but none were compared.
    """

    claim: ClaimId
    provider: str
    status: Status
    reason: str
    trace: str = ""
    calls: int = 0
    variants: int = 0
    compared: Compared = Compared()
    differences: Differences = Differences()
    first: Place | None = None
    variant: str = ""
    control: str = ""
    next_command: str = ""
    seed: int = 0
    executed: dict[str, str] = field(default_factory=dict)
    left_out: int = 0

    def __post_init__(self) -> None:
        if self.status in EVIDENCE and self.compared.elements == 0:
            raise ValueError(
                f"claim {self.claim}: {self.status} needs compared elements; nothing was compared"
            )
        if self.status is Status.REFUTED and self.first is None:
            raise ValueError(f"claim {self.claim}: refuted needs the first differing place")
        if not self.reason:
            raise ValueError(f"claim {self.claim}: a verdict needs its reason")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        record = asdict(self)
        record["first"] = None if self.first is None else self.first.to_dict()
        record["status"] = self.status.value
        record["differences"]["ulps"] = dict(self.differences.ulps)
        return record


class Exit:
    """Exit codes of the command line (design: a refutation is never masked)."""

    OK = 0
    REFUTED = 1
    USAGE = 2
    INCONCLUSIVE = 3
    NOT_RUN = 4
    NOTHING = 5
    INTERNAL = 6

    PRECEDENCE = (REFUTED, USAGE, INTERNAL, INCONCLUSIVE, NOT_RUN, NOTHING)


def worst(codes: Iterable[int]) -> int:
    """Return the exit code that wins when several apply: the first of 1, 2, 6, 3, 4, 5."""
    seen = set(codes)
    return next((code for code in Exit.PRECEDENCE if code in seen), Exit.OK)


def not_run(verdict: Verdict, named: frozenset[ClaimId]) -> bool:
    """Whether a claim that was named was not run, or not on every selected call; a probe never counts."""
    if verdict.claim not in named or verdict.status in PROBED:
        return False
    return verdict.status is Status.NOT_RUN or verdict.left_out > 0


def exit_code(verdicts: Iterable[Verdict], named: frozenset[ClaimId] = frozenset()) -> int:
    """Return the exit code of a set of verdicts; `named` are the claims given on the command line.

    A claim that was named and not run on every selected call is 4; one that was not named and not run is only
    shown. If no claim was judged or probed at all, the answer is 5.
    """
    verdicts = list(verdicts)
    codes = []
    for verdict in verdicts:
        if verdict.status is Status.REFUTED:
            codes.append(Exit.REFUTED)
        elif verdict.status is Status.INCONCLUSIVE:
            codes.append(Exit.INCONCLUSIVE)
        elif not_run(verdict, named):
            codes.append(Exit.NOT_RUN)
    if not any(verdict.status in EVIDENCE for verdict in verdicts):
        codes.append(Exit.NOTHING)
    return worst(codes)
