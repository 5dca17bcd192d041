"""The verbs as functions: `tracekit.record`, `merge`, `open`, `replay`, `diff`, `bind`, `verify`."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path

from tracekit.compare.diff import Diff, compare_traces
from tracekit.contract.judge import bind_runs as bind
from tracekit.gate.recorded import Judgement, judge
from tracekit.recorder.api import record
from tracekit.recorder.merge import merge
from tracekit.replayer import Report
from tracekit.replayer import replay as replay_traces
from tracekit.store import Trace, Violation, open_trace, verify_trace

StrPath = str | PathLike[str]
Names = str | Sequence[str] | None

__all__ = ["bind", "diff", "history", "merge", "open", "record", "replay", "verify"]


def open(path: StrPath) -> Trace:
    """Open a trace; use it as a context manager.

    Raises:
        TraceMissing: there is no such file.
        TraceTooNew: a newer format.
        TraceCorrupt: it breaks a rule of docs/format.md.
    """
    return open_trace(Path(path))


def verify(path: StrPath) -> list[Violation]:
    """Check every rule and digest of a trace; an empty list is a sound file."""
    return verify_trace(Path(path))


def history(path: StrPath) -> Judgement:
    """Prove the history of a trace again (docs/gate.md): legal, illegal with its code and place, or unknown.

    Raises:
        TraceMissing: there is no such file.
        TraceTooNew: a newer format.
        TraceCorrupt: it breaks a rule of docs/format.md.
    """
    with open_trace(Path(path)) as trace:
        return judge(trace.recording, trace if trace.recording.history is not None else ())


def replay(
    traces: StrPath | Trace | Sequence[StrPath | Trace],
    *,
    provider: Names = None,
    claims: Names = None,
    probe: bool = False,
    layers: frozenset[int] | Sequence[int] | None = None,
    calls: frozenset[int] | Sequence[int] | None = None,
    requests: Names = None,
    seed: int = 0,
    threads: int = 0,
    timeout: float | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Replay claims on traces.

    Args:
        traces: one or several paths or open traces.
        provider: one or several kernels; None is TKA-1 and the recorded kernel where it is installed.
        claims: one or several claims; None is those that the kernel promises.
        probe: also try claims that the kernel does not promise.
        layers: only these layers.
        calls: only these calls.
        requests: only calls that hold one of these requests (a key or its start).
        seed: seed of random variants.
        threads: threads of CPU kernels; 0 is their default.
        timeout: seconds that one launch may take; None is the setting TRACEKIT_TIMEOUT.
        jobs: traces replayed at a time; None takes the cores that this process may use.
        progress: called with (done, total, text).

    Raises:
        UsageError: an unknown provider or claim; the message lists the valid ones.
        NothingSelected: the filters leave no call.
    """
    given = [traces] if isinstance(traces, (str, PathLike, Trace)) else list(traces)
    with ExitStack() as stack:
        opened = [
            trace if isinstance(trace, Trace) else stack.enter_context(open_trace(Path(trace)))
            for trace in given
        ]
        return replay_traces(
            opened,
            providers=_names(provider),
            claims=_names(claims),
            probe=probe,
            layers=None if layers is None else frozenset(layers),
            calls=None if calls is None else frozenset(calls),
            requests=_names(requests),
            seed=seed,
            threads=threads,
            timeout=timeout,
            jobs=jobs,
            progress=progress,
        )


def diff(base: StrPath | Trace, target: StrPath | Trace) -> Diff:
    """Compare two traces in logical coordinates; see `tracekit.compare.diff`."""
    with ExitStack() as stack:
        ours, theirs = (
            trace if isinstance(trace, Trace) else stack.enter_context(open_trace(Path(trace)))
            for trace in (base, target)
        )
        return compare_traces(ours, theirs)


def _names(names: Names) -> tuple[str, ...] | None:
    if names is None:
        return None
    return (names,) if isinstance(names, str) else tuple(names)
