"""What a finished recording lacks, in words: everything, or the gradients of some launches."""

from collections import Counter

from tracekit.errors import NothingSelected, TracekitError, Unsupported
from tracekit.recorder.ledger import Ledger
from tracekit.recorder.observation import LateGradients


def missing_gradients(expected: list[LateGradients]) -> str:
    """Say which launches were to have gradients and lack some; empty where none do.

    Their forward is as good as any.
    """
    missing = [
        late.lost or ("their backward never ran" if late.expected and late.d_out is None else "")
        for late in expected
    ]
    lost = Counter(filter(None, missing))
    if not lost:
        return ""
    told = [f"{count} of {len(expected)} calls, {why}" for why, count in lost.items()]
    return f"missing of {'; '.join(told)}"


def nothing_kept(ledger: Ledger, architecture: str, problems: list[str]) -> TracekitError:
    """Say which of three reasons it is that steps ran and no call was kept.

    Returns:
        NothingSelected: `R-FILTER`.
        Unsupported: `R-BYPASS`, `R-NOTHING`.
    """
    model = architecture or "the model"
    steps = ledger.steps
    fired, filtered = (sum(getattr(line, name) for line in ledger.normal()) for name in ("fired", "filtered"))
    if fired and fired == filtered:
        return NothingSelected(
            f"the filters leave none of the {filtered} calls of {steps} steps; widen layers= or steps=.",
            rule="R-FILTER",
        )
    if not fired:
        return Unsupported(
            f"{model} ran {steps} steps and never called the attention interface: its attention bypasses "
            "it. Call session.attention(...) from the attention code, or set an implementation that "
            "dispatches through the interface.",
            rule="R-BYPASS",
            steps=steps,
            model=model,
        )
    return Unsupported(
        f"{model}: none of {fired - filtered} calls in {steps} steps could be kept. "
        f"The first problem: {problems[0]}",
        rule="R-NOTHING",
        steps=steps,
        problems=problems,
    )
