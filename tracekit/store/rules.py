"""How a broken rule of docs/format.md is reported."""

from dataclasses import dataclass, field
from typing import Any

from tracekit.errors import TraceCorrupt


@dataclass(frozen=True)
class Violation:
    """One broken rule of a trace file.

    Args:
        rule: its code in docs/format.md, such as `E-19`.
        message: one sentence that names the offender.
        fields: the facts of the message, JSON-serialisable.
    """

    rule: str
    message: str
    fields: dict[str, Any] = field(default_factory=dict)


def corrupt(rule: str, message: str, **fields: Any) -> TraceCorrupt:
    """Return the error for a broken rule; the caller raises it.

    Args:
        rule: code in docs/format.md.
        message: one sentence without its next step, which is added here.
        fields: the facts of the message.
    """
    text = f"{message} Rule {rule} of docs/format.md; `tracekit verify` lists every violation."
    return TraceCorrupt(text, rule=rule, problem=message, **fields)
