"""Progress on stderr, and only when it is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tracekit.report.terminal import console

Advance = Callable[[int, int, str], None]


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """Yield `advance(done, total, text)`; it draws a bar on a terminal and is silent elsewhere."""
    err = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def advance(done: int, total: int, text: str = "") -> None:
            bar.update(task, completed=done, total=total, description=f"{title} {text}".strip())

        yield advance
