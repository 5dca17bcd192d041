"""`tracekit.record`: the public context manager."""

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import entry_points
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from tracekit.errors import UsageError
from tracekit.model import AttentionCall, Bits, IndexerCall, Recording
from tracekit.recorder.derive import derive_lse
from tracekit.recorder.filters import parse_filters
from tracekit.recorder.manual import ManualSession
from tracekit.recorder.session import Session


class CaptureIncomplete(UserWarning):
    """Calls are missing from a trace although no filter asked for it; the ledger says which and why."""


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


BUILTIN = {"transformers": "tracekit.engines.transformers:attach"}
"""Names, not imports: recording knows no engine."""


@contextmanager
def record(
    path: str | PathLike[str],
    *,
    engine: str | None = None,
    layers: Iterable[int] | None = None,
    steps: Iterable[int] | None = None,
    derive: Callable[[AttentionCall], Bits] | None = derive_lse,
    write: Writer | None = None,
    **options: Any,
) -> Iterator[ManualSession]:
    """Record attention into a trace, written when the block is left.

    `with tracekit.record("run.h5", engine="transformers", model=model): model.generate(...)`

    Args:
        path: the trace.
        engine: name of an engine adapter; None is `transformers` where a `model` is given, and otherwise
            records only what `session.attention` is given.
        layers: 0-based layers to keep; None keeps all.
        steps: 0-based steps to keep; None keeps all.
        derive: gives the LSE of calls whose kernel gave none.
        write: writes the trace; None takes `tracekit.store.write_trace`.
        options: what the engine adapter needs (`model` for transformers).

    Raises:
        UsageError: `R-ENGINE` for an engine that is not known.
        Unsupported: the model cannot be recorded, or never called the attention interface.

    Warns:
        CaptureIncomplete: calls are missing that no filter left out; `session.problems` lists why.
    """
    if engine is None and "model" in options:
        engine = "transformers"
    session = ManualSession(parse_filters(layers, steps), derive)
    adapter = None if engine is None else _adapter(engine)(session, **options)
    try:
        if adapter is None:
            yield session
        else:
            with adapter:
                yield session
    except BaseException:
        # What was recorded before the failure is still evidence; the failure itself goes on.
        if session.recorded:
            _save(Path(path), session, write)
        raise
    _save(Path(path), session, write)
    if session.problems:
        more = f" (and {len(session.problems) - 1} more)" if len(session.problems) > 1 else ""
        warnings.warn(f"{path}: {session.problems[0]}{more}", CaptureIncomplete, stacklevel=3)


def _save(path: Path, session: Session, write: Writer | None) -> None:
    recording, calls = session.finish()
    if write is None:
        write = importlib.import_module("tracekit.store").write_trace
    more = {"indexer_calls": session.indexer_calls} if session.indexer_calls else {}
    session.written = write(path, recording, calls, **more)


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
