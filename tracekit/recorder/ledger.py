"""The capture ledger: one line a step, what should have been seen and what was."""

from collections import Counter
from dataclasses import dataclass, field, replace

from tracekit.model import StepRecord, Tag


@dataclass
class OpenStep:
    """A step while it runs; `expected` is None where nobody knows how many hooks it has.

    `looked_at` counts the hooks that fired for launches that no filter left out.
    """

    step: int
    expected: int | None
    looked_at: int = 0
    recorded: int = 0
    filtered: int = 0
    wanted: int = 0
    written: int = 0
    left_out: int = 0
    reasons: list[str] = field(default_factory=list)

    def cut(self, reason: str) -> bool:
        """Note why something is missing, once; say whether it was new."""
        new = reason not in self.reasons
        if new:
            self.reasons.append(reason)
        return new

    def close(self) -> StepRecord:
        """Return the line. Hooks that should have fired and did not are a reason of their own."""
        fired = self.looked_at + self.filtered
        expected = fired if self.expected is None else self.expected
        if fired < expected and not self.reasons:
            self.cut(
                f"{expected - fired} of {expected} attention modules did not call the attention interface"
            )
        return StepRecord(
            self.step,
            expected,
            fired,
            self.recorded,
            self.filtered,
            "; ".join(self.reasons),
            Tag.NORMAL,
            self.wanted,
            self.written,
            self.left_out,
        )


class Ledger:
    """The lines so far, in the order in which they were closed."""

    def __init__(self) -> None:
        self.lines: list[StepRecord] = []
        self._place: dict[int, int] = {}
        self._counts: Counter[Tag] = Counter()

    @property
    def steps(self) -> int:
        """Normal steps so far."""
        return self._counts[Tag.NORMAL]

    def normal(self) -> list[StepRecord]:
        """Return the lines of normal steps."""
        return [line for line in self.lines if line.tag is Tag.NORMAL]

    def close(self, step: OpenStep) -> StepRecord:
        """Add a step that has ended, and return its line."""
        line = step.close()
        self._place[line.step] = len(self.lines)
        self._add(line)
        return line

    def other(self, tag: Tag, expected: int, fired: int) -> None:
        """Add a run that is no step: nothing of it is recorded, and nothing missing."""
        self._add(StepRecord(self._counts[tag], expected, fired, 0, 0, tag=tag))

    def cut(self, step: int, reason: str, *, recorded: int = 0, written: int = 0) -> None:
        """Take calls, and their bytes, off the line of a step, with the reason."""
        place = self._place[step]
        line = self.lines[place]
        self.lines[place] = replace(
            line,
            recorded=line.recorded - recorded,
            written=line.written - written,
            cut="; ".join(filter(None, [line.cut, reason])),
        )

    def _add(self, line: StepRecord) -> None:
        self.lines.append(line)
        self._counts[line.tag] += 1
