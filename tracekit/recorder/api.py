"""`tracekit.record`: the public context manager."""

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import entry_points
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from tracekit.env import check_budget
from tracekit.errors import TracekitError, UsageError
from tracekit.model import AttentionCall, Bits, IndexerCall, Recording, Share
from tracekit.recorder.conventions import contradictions
from tracekit.recorder.derive import derive_lse
from tracekit.recorder.filters import parse_filters
from tracekit.recorder.manual import ManualSession
from tracekit.recorder.session import Session


class CaptureIncomplete(UserWarning):
    """A trace lacks calls that no filter left out: not seen, not understood, or over KV that changed.

    The ledger says which and why.
    """


class Attach(Protocol):
    """How an engine adapter joins a recording: `module:attach`, entry point group `tracekit.engines`."""

    def __call__(self, session: Session, **options: Any) -> AbstractContextManager[object]:
        """Hook into the engine until the context is left."""
        ...


class Writer(Protocol):
    """What writes a trace; `indexer_calls` is passed only where there are some."""

    def __call__(
        self,
        path: Path,
        recording: Recording,
        calls: list[AttentionCall],
        /,
        *,
        indexer_calls: Sequence[IndexerCall] = (),
    ) -> object:
        """Write a trace and return what the session keeps as `written`."""
        ...


BUILTIN = {
    "megatron": "tracekit.engines.megatron:attach",
    "transformers": "tracekit.engines.transformers:attach",
    "vllm": "tracekit.engines.vllm:attach",
}
"""Names, not imports: recording knows no engine."""


@contextmanager
def record(
    path: str | PathLike[str],
    *,
    engine: str | None = None,
    layers: Iterable[int] | None = None,
    steps: Iterable[int] | None = None,
    rows: Iterable[int] | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    max_size_gb: float | None = None,
    share: Share | None = None,
    derive: Callable[[AttentionCall], Bits] | None = derive_lse,
    force: bool = False,
    write: Writer | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    **options: Any,
) -> Iterator[ManualSession]:
    """Record attention into a trace, written when the block is left.

    Where the block raises, what was recorded is written too, with a note and its last step cut, but only to
    a path where no file is.

    `with tracekit.record("run.h5", engine="transformers", model=model): model.generate(...)`

    Args:
        path: the trace.
        engine: name of an engine adapter; None is `transformers` where a `model` is given, `vllm` where an
            `llm` is, and otherwise records only what `session.attention` is given.
        layers: 0-based layers to keep; None keeps all.
        steps: 0-based steps to keep; None keeps all.
        rows: 0-based positions of query rows to keep; None keeps all. The KV that they read stays; launch
            plans and gradients of calls that lose rows do not.
        include: globs (fnmatch) against the name of the layer's module and the engine's name of the request:
            rows of which neither matches are left out.
        exclude: globs likewise: rows of which one matches are left out.
        max_size_gb: where the recording ends: so many 10^9 bytes of captured rows. The engine goes on.
        share: which part of a parallel job this process is; None is all of it, or what the engine says.
        derive: gives the LSE of calls whose kernel gave none.
        force: write over a file that exists.
        write: writes the trace; None takes `tracekit.store.write_trace`.
        progress: called with (done, total, text) while the trace is made at the end.
        options: what the engine adapter needs (`model` for transformers, `llm` for vllm).

    Raises:
        UsageError: `R-ENGINE` for an engine that is not known; `U-EXISTS`, `U-FOLDER` for the path;
            also where a file has come there meanwhile: it stays, and the trace is written beside it.
        TraceUnwritable: `F-KIND`, `F-WRITE`.
        Unsupported: the model cannot be recorded, or never called the attention interface.
        ConventionContradicted: the numbers do not fit the declared conventions; the trace is written.

    Warns:
        CaptureIncomplete: calls are missing that no filter left out; `session.problems` lists why.
    """
    if engine is None and "model" in options:
        engine = "transformers"
    if engine is None and "llm" in options:
        engine = "vllm"
    if engine is None and options:
        raise UsageError(
            f"record() does not know the option {', '.join(options)}; without an engine it takes layers, "
            "steps, rows, include, exclude, max_size_gb, share, derive, force, write and progress.",
            rule="R-OPTION",
            options=list(options),
        )
    if write is None:
        importlib.import_module("tracekit.store.target").check_target(path, force=force)
    filters = parse_filters(layers, steps, rows, include, exclude)
    session = ManualSession(filters, derive, _bytes(max_size_gb))
    session.share = share
    adapter = None if engine is None else _adapter(engine)(session, **options)
    try:
        if adapter is None:
            yield session
        else:
            with adapter:
                yield session
    except BaseException as failure:
        _keep_part(Path(path), session, write, failure)
        raise
    target = Path(path) if force or write is not None else _not_taken(Path(path))
    calls = _save(target, session, write, progress)
    if session.problems:
        more = f" (and {len(session.problems) - 1} more)" if len(session.problems) > 1 else ""
        warnings.warn(f"{target}: {session.problems[0]}{more}", CaptureIncomplete, stacklevel=3)
    # The trace is written first: what was recorded stays, whatever its conventions turn out to be.
    for error in contradictions(calls):
        raise error
    if target != Path(path):
        raise UsageError(
            f"{path} was written by somebody else while this was recorded, and stays; this recording is "
            f"{target}. Give each recording a name of its own.",
            rule="U-EXISTS",
            path=str(target),
        )


def _not_taken(path: Path) -> Path:
    """The path, or one beside it where a file has come there since the recording began."""
    beside = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
    return path if not path.exists() else next(other for other in beside if not other.exists())


def _keep_part(path: Path, session: Session, write: Writer | None, error: BaseException) -> None:
    """What was recorded before a failure is evidence, but never in the place of a whole recording."""
    if not session.recorded:
        return
    if write is None and path.exists():
        error.add_note(f"tracekit: {path} stays as it was; what was recorded before this is not kept.")
        return
    text = f"ended by {type(error).__name__}: {error}"[:500]
    session.interrupt(text.encode("ascii", "backslashreplace").decode())
    try:
        _save(path, session, write)
    except (TracekitError, OSError) as second:
        error.add_note(f"tracekit: what was recorded before this is not kept: {second}")


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(check_budget(gigabytes, "max_size_gb") * 1e9)


def _save(
    path: Path,
    session: Session,
    write: Writer | None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[AttentionCall]:
    recording, calls = session.finish(progress)
    more: dict[str, Any] = {"indexer_calls": session.indexer_calls} if session.indexer_calls else {}
    if write is None:
        write = importlib.import_module("tracekit.store").write_trace
        if progress is not None:
            more["progress"] = lambda done, _: progress(done, len(calls), "calls written")
    session.written = write(path, recording, calls, **more)
    return calls


def _adapter(name: str) -> Attach:
    known = {point.name: point.value for point in entry_points(group="tracekit.engines")} | BUILTIN
    if name not in known:
        raise UsageError(
            f"engine {name!r} is not known; the engines are {', '.join(sorted(known))}.",
            rule="R-ENGINE",
            engine=name,
            valid=sorted(known),
        )
    module, _, attribute = known[name].partition(":")
    attach: Attach = getattr(importlib.import_module(module), attribute)
    return attach
