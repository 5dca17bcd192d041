"""The ledger and the calls of a trace say the same."""

from collections import Counter
from collections.abc import Iterable, Sequence

from tracekit.model import StepRecord, Tag


def disagreement(ledger: Sequence[StepRecord], steps: Iterable[int]) -> tuple[str, int] | None:
    """Return what is wrong, in words, and the step; None where nothing is.

    Args:
        ledger: one line a normal step, besides those of other runs; none at all where no ledger was kept.
        steps: the step of each call.
    """
    if not ledger:
        return None
    calls, seen = Counter(steps), set()
    for line in ledger:
        if line.tag is not Tag.NORMAL:
            continue
        if line.step in seen:
            return f"the ledger has two lines of step {line.step}", line.step
        seen.add(line.step)
        if line.recorded != calls[line.step]:
            held = f"the trace holds {calls[line.step]}"
            return f"the ledger counts {line.recorded} calls of step {line.step}, {held}", line.step
    for step in calls.keys() - seen:
        return f"the ledger has no line of step {step}, which has calls", step
    return None
