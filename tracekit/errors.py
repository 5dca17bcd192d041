"""One class a kind of error; each is also the builtin that people would catch.

A message names the rule, the offender and the next step. `fields` holds the same facts for `--json`,
and `exit_code` is what the command line ends with (docs/verdicts.md).
"""

from typing import Any, ClassVar


class TracekitError(Exception):
    """Base of every error that tracekit raises on purpose.

    Args:
        message: one sentence that names the rule, the offender and the next step.
        rule: the code of the broken rule, such as `M-ROWS-DUPLICATE` or `E-07`.
        fields: the facts of the message, JSON-serialisable.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, rule: str, **fields: Any) -> None:
        super().__init__(message)
        self.rule = rule
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints for this error."""
        return {"error": type(self).__name__, "rule": self.rule, "message": str(self), **self.fields}

    def __reduce__(self) -> tuple[Any, ...]:
        """Survive the way back from a child process with rule and fields."""
        return _rebuild, (type(self), str(self), self.rule, self.fields)


def _rebuild(kind: type[TracekitError], message: str, rule: str, fields: dict[str, Any]) -> TracekitError:
    return kind(message, rule=rule, **fields)


class InvalidCall(TracekitError, ValueError):
    """A noun of the model breaks one of its rules (shape, dtype, range, identity)."""


class ConventionAmbiguous(TracekitError, ValueError):
    """The input has more than one reading; tracekit refuses instead of guessing."""


class ConventionContradicted(TracekitError, ValueError):
    """A declared convention does not fit the recorded numbers."""


class Unsupported(TracekitError, NotImplementedError):
    """A kernel or an engine cannot do what was asked; nothing was run."""


class Unavailable(TracekitError, RuntimeError):
    """Something optional is missing: a package, a device, a model file."""


class UsageError(TracekitError, ValueError):
    """A name or a value given by the user does not exist; the message lists the valid ones."""


class NothingSelected(UsageError):
    """The filters leave no call, layer or request."""

    exit_code = 5


class TraceMissing(TracekitError, FileNotFoundError):
    """There is no file at the path."""


class TraceUnreadable(TracekitError, OSError):
    """The system does not give the bytes of a file, or it is no file at all."""


class TraceUnwritable(TracekitError, OSError):
    """The disk or the folder does not take a file."""


class TraceCorrupt(TracekitError, ValueError):
    """A file breaks a rule of docs/format.md."""


class TraceTooNew(TracekitError, ValueError):
    """A file was written by a newer format than this tracekit reads."""


class ProviderFailed(TracekitError, RuntimeError):
    """A kernel raised, died or did not answer; carries what is known of it."""

    exit_code = 3


class GateRefused(TracekitError, ValueError):
    """What was asked for is not what may legally come next; the ledger stays as it was."""


class BindingInvalid(TracekitError, ValueError):
    """A readback, a plan or a run folder breaks a rule of docs/binding.md, and nothing was bound."""
