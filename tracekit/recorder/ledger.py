"""The capture ledger: one line a step, what should have been seen and what was."""

from dataclasses import dataclass, field

from tracekit.model import StepRecord


@dataclass
class OpenStep:
    """A step while it runs; `expected` is None where nobody knows how many hooks it has."""

    step: int
    expected: int | None
    fired: int = 0
    recorded: int = 0
    filtered: int = 0
    reasons: list[str] = field(default_factory=list)

    def cut(self, reason: str) -> bool:
        """Note why something is missing, once; say whether it was new."""
        new = reason not in self.reasons
        if new:
            self.reasons.append(reason)
        return new

    def close(self) -> StepRecord:
        """Return the line. Hooks that should have fired and did not are a reason of their own."""
        expected = self.fired if self.expected is None else self.expected
        if self.fired < expected and not self.reasons:
            self.cut(
                f"{expected - self.fired} of {expected} attention modules did not call the "
                "attention interface"
            )
        return StepRecord(
            self.step, expected, self.fired, self.recorded, self.filtered, "; ".join(self.reasons)
        )
