"""A job: a command with all its processes, each of which writes a trace; at the end they become one.

The traces stand in a folder of their own beside the target until they are merged. The folder stays when one
of them could not be used, so that nothing is lost.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tracekit.errors import TracekitError, UsageError
from tracekit.model import Tag
from tracekit.recorder.merge import merge
from tracekit.store import TraceSummary, open_trace, verify_trace

STARTED = ".started"
"""Ends the name of the file that stands beside a trace as long as its process records."""

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Outcome:
    """What a job left.

    Args:
        code: exit code of the command; 128 + N where signal N ended it.
        traces: how many processes left a sound trace.
        summary: the trace that was made of them; None where none was.
        problems: what went wrong, in words.
        kept: the folder in which traces are left; None where none are.
    """

    code: int
    traces: int
    summary: TraceSummary | None
    problems: tuple[str, ...]
    kept: Path | None


def run_job(
    command: Sequence[str],
    out: Path,
    environ: Mapping[str, str],
    startup: Path,
    progress: Progress | None = None,
) -> Outcome:
    """Run a command, wait for it, and make one trace of those of its processes.

    Args:
        command: program and arguments.
        out: the trace; written over where it exists.
        environ: of the command, without what is set here.
        startup: folder that its Python processes look into when they start.
        progress: called with (done, total, text) while traces are merged.

    Raises:
        UsageError: `U-COMMAND`, the command cannot be started.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{out.stem}.ranks-", dir=out.parent))
    path = os.pathsep.join(filter(None, [str(startup), environ.get("PYTHONPATH", "")]))
    told = {**environ, "TRACEKIT_RECORD": str((folder / out.name).absolute()), "PYTHONPATH": path}
    try:
        code = _wait(command, told)
        return _gather(folder, out, code, command, progress)
    finally:
        with suppress(OSError):
            folder.rmdir()


def _wait(command: Sequence[str], environ: Mapping[str, str]) -> int:
    with _passing_on() as to:
        try:
            process = subprocess.Popen(command, env=dict(environ))
        except (OSError, ValueError) as error:
            reason = (getattr(error, "strerror", None) or str(error)).lower()
            raise UsageError(
                f"{command[0]!r} cannot be started: {reason}; give a program behind --.",
                rule="U-COMMAND",
                command=list(command),
            ) from None
        to(process)
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _passing_on() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Let signals reach the command, which decides what comes of them; those from before it began too.

    A terminal sends an interrupt to both already; to many programs a second one would mean something else.
    """
    receiver: subprocess.Popen[bytes] | None = None
    waiting: list[int] = []

    def send(number: int, _: FrameType | None) -> None:
        if receiver is None:
            waiting.append(number)
        elif number == signal.SIGTERM or not _in_foreground():
            receiver.send_signal(number)

    def to(process: subprocess.Popen[bytes]) -> None:
        nonlocal receiver
        receiver = process
        for number in waiting:
            process.send_signal(number)

    # What is ignored (nohup) stays ignored, here and in the command.
    heard = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, send) for number in heard}
    try:
        yield to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether a terminal sends its signals to this process and its children."""
    try:
        return os.tcgetpgrp(sys.__stdin__.fileno() if sys.__stdin__ else 0) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _apart(command: Sequence[str]) -> str:
    """Why the command itself cannot be recorded, where it is a Python that looks at no environment."""
    if not re.match(r"(python|pypy)[\d.]*$", Path(command[0]).name):
        return ""
    for argument in command[1:]:
        if not re.match(r"-[A-Za-z]", argument) or argument[1] in "cm":
            return ""
        found = next((letter for letter in argument[1:] if letter in "IES"), None)
        if found is not None:
            return f"; {command[0]} was started with -{found}, and such a Python is never recorded"
    return ""


def _gather(folder: Path, out: Path, code: int, command: Sequence[str], progress: Progress | None) -> Outcome:
    """Make one trace of what a command has left."""
    problems: list[str] = []
    lost: dict[int, str] = {}
    sound = []
    for marker in sorted(folder.glob("*" + STARTED)):
        reason = marker.read_text()
        marker.unlink()
        if marker.with_name(marker.name.removesuffix(STARTED)).exists():
            problems.append(f"{_who(marker)}: {reason}")
        else:
            lost[_rank(marker)] = reason
            problems.append(f"{_who(marker)} left no trace: {reason}")
    for path in sorted(folder.glob("*" + out.suffix)):
        wrong = _damage(path)
        if wrong:
            lost[_rank(path)] = "its trace is damaged"
            problems.append(f"the trace of {_who(path)} cannot be used: {wrong}")
        else:
            sound.append(path)
    if not sound and not problems:
        problems.append(
            "no process recorded anything: none ran a model of an engine that is known here "
            "(docs/engines.md), none ended by itself, or all were Pythons started with -I, -E or -S or "
            f"without this environment{_apart(command)}."
        )
    summary = None
    try:
        if sound:
            problems += [_cut(path) for path in sound if _cut(path)]
            summary = _one(sound, out, lost, progress)
            for path in sound:
                path.unlink(missing_ok=True)
    except TracekitError as error:
        problems.append(f"the traces are not merged: {error}")
    kept = folder if any(folder.glob("*")) else None  # a command may have taken the folder away
    return Outcome(code, len(sound), summary, tuple(problems), kept)


def _cut(path: Path) -> str:
    """What a sound trace lacks; empty where it has all that was wanted."""
    with open_trace(path) as trace:
        cut = [line for line in trace.recording.ledger if line.tag is Tag.NORMAL and not line.complete]
    more = f" (and {len(cut) - 1} more steps)" if len(cut) > 1 else ""
    return f"{_who(path)} lacks calls of step {cut[0].step}: {cut[0].cut}{more}" if cut else ""


def _one(sound: list[Path], out: Path, lost: dict[int, str], progress: Progress | None) -> TraceSummary:
    """Make the target: the only trace as it is, or what is merged of several, or of one of several ranks."""
    with open_trace(sound[0]) as trace:
        share = trace.recording.share
    if len(sound) == 1 and not lost and (share is None or share.world == 1):
        shutil.move(sound[0], out)
        with open_trace(out) as trace:
            return trace.summary()
    return merge(sound, out, force=True, lost=lost, apart=True, progress=progress)


def _damage(path: Path) -> str:
    """What is wrong with a trace; empty where nothing is."""
    try:
        violations = verify_trace(path)
    except TracekitError as error:
        return str(error)
    return violations[0].message if violations else ""


def _rank(path: Path) -> int:
    match = re.search(r"\.rank(\d+)-", path.name)
    return int(match[1]) if match else 0


def _who(path: Path) -> str:
    match = re.search(r"\.rank(\d+)-(\d+)", path.name)
    return f"process {match[2]} (rank {match[1]})" if match else path.name
