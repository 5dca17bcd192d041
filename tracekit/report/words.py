"""Sentences made from verdicts, the same on the terminal, in a pytest failure and in a log."""

from collections import Counter
from collections.abc import Sequence

from tracekit.verdict import PROBED, Place, Status, Verdict

ORDER = (
    Status.HELD,
    Status.BOUNDED,
    Status.REFUTED,
    Status.INCONCLUSIVE,
    Status.OBSERVED_SAME,
    Status.OBSERVED_VARIES,
    Status.NOT_APPLICABLE,
    Status.NOT_RUN,
)


def place_words(place: Place) -> str:
    """Return where: `request 3f..-0 position 5 layer 0 head 0 element 3 of out`."""
    element = "" if place.element is None else f" element {place.element}"
    return (
        f"request {place.request} position {place.position} layer {place.layer} "
        f"head {place.head}{element} of {place.tensor}"
    )


def values_words(place: Place) -> str:
    """Return what: `expected 0x3f80 (1.0), got 0x3f81 (1.0078125), 1 ULP`."""
    distance = "" if place.ulps is None else f", {place.ulps:,} ULP"
    return (
        f"expected {place.expected_bits} ({place.expected!r}), "
        f"got {place.actual_bits} ({place.actual!r}){distance}"
    )


def compared_words(verdict: Verdict) -> str:
    """Return how much was compared: `1,152 rows, 73,728 values`."""
    compared = verdict.compared
    return (
        f"{compared.rows:,} rows, {compared.elements:,} values" if compared.elements else "nothing compared"
    )


def ulps_words(verdict: Verdict) -> str:
    """Return how far values are apart: `ULPs 0: 73,000 · 1: 700 · 2-3: 28`."""
    return "ULPs " + " · ".join(f"{name}: {count:,}" for name, count in verdict.differences.ulps)


def verdict_lines(verdict: Verdict) -> list[str]:
    """Return the lines that explain one verdict: its reason first, then where, what, how far, what next."""
    reason, differences = verdict.reason, verdict.differences
    lines = [f"{reason}: {compared_words(verdict)}" if verdict.compared.elements else reason]
    if verdict.first is not None:
        lines = [reason, f"first: {place_words(verdict.first)}", values_words(verdict.first)]
    if differences.elements and differences.ulps:
        lines.append(ulps_words(verdict))
    if verdict.next_command:
        lines.append(f"next: {verdict.next_command}")
    return lines


def summary(verdicts: Sequence[Verdict], code: int) -> str:
    """Return the last, stable line: `12 claims: 10 held, 1 refuted, 1 inconclusive. exit 1`."""
    judged = Counter(verdict.status for verdict in verdicts if verdict.status not in PROBED)
    probed = Counter(verdict.status for verdict in verdicts if verdict.status in PROBED)
    counts = judged + probed
    parts = [f"{counts[status]} {status.value}" for status in ORDER if counts[status]]
    claims = "1 claim" if len(verdicts) == 1 else f"{len(verdicts)} claims"
    return f"{claims}: {', '.join(parts) or 'none'}. exit {code}"
