"""What surrounds the calls of a trace: its requests, its ledger of captures, its model."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall
from tracekit.model.history import Entry
from tracekit.model.provenance import Identity
from tracekit.model.rows import RequestKey
from tracekit.model.share import Share


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


class Tag(StrEnum):
    """What an engine ran: only a normal step is about tokens that somebody sent, and only it holds calls."""

    NORMAL = "normal"
    WARMUP = "warmup"
    PROFILE = "profile"
    CAPTURE = "capture"


@dataclass(frozen=True)
class StepRecord:
    """One line of the capture ledger: what one engine step should have given, and gave.

    Args:
        step: 0-based among the lines of its tag; for normal lines the engine step.
        expected: hooks that the step should have fired.
        fired: hooks that fired.
        recorded: calls that were kept.
        filtered: calls that a filter of the user left out.
        cut: why calls are missing although no filter asked for it; empty where none is.
        tag: what the step was.
        wanted: bytes of Q, outputs and new KV rows of the launches that the filters kept.
        written: bytes of them that were captured; fewer where rows were left out or calls were lost.
        left_out: query rows of recorded calls that a filter left out.

    Raises:
        InvalidCall: `M-LEDGER` for a number below 0, more calls than hooks that fired, more bytes written
            than wanted, or calls in a line that is not normal.
    """

    step: int
    expected: int
    fired: int
    recorded: int
    filtered: int
    cut: str = ""
    tag: Tag = Tag.NORMAL
    wanted: int = 0
    written: int = 0
    left_out: int = 0

    def __post_init__(self) -> None:
        numbers = (self.step, self.expected, self.fired, self.recorded, self.filtered)
        sizes = (self.wanted - self.written, self.written, self.left_out)
        if min(*numbers, *sizes) < 0 or self.recorded + self.filtered > self.fired:
            raise InvalidCall(
                f"ledger line of step {self.step}: the {self.recorded} recorded and {self.filtered} filtered "
                f"calls are among the {self.fired} that fired, no number is below 0, and no more is written "
                "than was wanted.",
                rule="M-LEDGER",
                step=self.step,
            )
        if self.tag is not Tag.NORMAL and self.recorded:
            raise InvalidCall(
                f"ledger line {self.step} of the {self.tag} runs: such a run has no calls to record.",
                rule="M-LEDGER",
                step=self.step,
            )

    @property
    def complete(self) -> bool:
        """Whether nothing is missing that was not filtered on purpose."""
        if self.tag is not Tag.NORMAL:
            return not self.cut
        return not self.cut and self.expected == self.fired == self.recorded + self.filtered


@dataclass(frozen=True, eq=False)
class Recording:
    """Everything of a trace that is not a call.

    Args:
        identity: which model.
        requests: each request once.
        ledger: one record a step.
        notes: free text by name (command line, driver), for `inspect`.
        share: which part of a parallel job this is; None where it is all of it, or nobody said.
        history: what the engine said that it did, in order; None where nobody followed it.
    """

    identity: Identity = field(default_factory=Identity)
    requests: tuple[Request, ...] = ()
    ledger: tuple[StepRecord, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    share: Share | None = None
    history: tuple[Entry, ...] | None = None
