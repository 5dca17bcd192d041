"""What surrounds the calls of a trace: its requests, its ledger of captures, its model."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall
from tracekit.model.provenance import Identity
from tracekit.model.rows import RequestKey


@dataclass(frozen=True, eq=False)
class Request:
    """One request of a recording.

    Args:
        key: its identity, from the prompt.
        token_ids: int64 `[n]`, prompt and generated tokens that were seen as rows.
        prompt_length: how many of them are prompt.
        alias: the engine's own name for it.
    """

    key: RequestKey
    token_ids: npt.NDArray[np.int64]
    prompt_length: int
    alias: str = ""

    def __post_init__(self) -> None:
        tokens = np.array(self.token_ids, np.int64, copy=True)
        tokens.flags.writeable = False
        object.__setattr__(self, "token_ids", tokens)
        if not 0 <= self.prompt_length <= tokens.size:
            raise InvalidCall(
                f"request {self.key}: a prompt of {self.prompt_length} tokens in {tokens.size}.",
                rule="M-REQUEST",
            )
        if RequestKey.of_prompt(tokens[: self.prompt_length], self.key.ordinal) != self.key:
            raise InvalidCall(f"request {self.key}: the key is not that of its prompt.", rule="M-REQUEST")


@dataclass(frozen=True)
class StepRecord:
    """One line of the capture ledger: what one engine step should have given, and gave.

    Args:
        step: 0-based engine step.
        expected: hooks that the step should have fired.
        fired: hooks that fired.
        recorded: calls that were kept.
        filtered: calls that a filter of the user left out.
        cut: why calls are missing although no filter asked for it; empty where none is.

    Raises:
        InvalidCall: `M-LEDGER` for a number below 0, or more calls than hooks that fired.
    """

    step: int
    expected: int
    fired: int
    recorded: int
    filtered: int
    cut: str = ""

    def __post_init__(self) -> None:
        numbers = (self.step, self.expected, self.fired, self.recorded, self.filtered)
        if min(numbers) < 0 or self.recorded + self.filtered > self.fired:
            raise InvalidCall(
                f"ledger line of step {self.step}: the {self.recorded} recorded and {self.filtered} filtered "
                f"calls are among the {self.fired} that fired, and no number is below 0.",
                rule="M-LEDGER",
                step=self.step,
            )

    @property
    def complete(self) -> bool:
        """Whether nothing is missing that was not filtered on purpose."""
        return not self.cut and self.expected == self.fired == self.recorded + self.filtered


@dataclass(frozen=True, eq=False)
class Recording:
    """Everything of a trace that is not a call.

    Args:
        identity: which model.
        requests: each request once.
        ledger: one record a step.
        notes: free text by name (command line, driver), for `inspect`.
    """

    identity: Identity = field(default_factory=Identity)
    requests: tuple[Request, ...] = ()
    ledger: tuple[StepRecord, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
