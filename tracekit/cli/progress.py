"""Progress on stderr, and only when it is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tracekit.report.terminal import console

Advance = Callable[[int, int, str], None]


@contextmanager
def progress(title: str, *, started: bool = True) -> Iterator[Advance]:
    """Yield `advance(done, total, text)`; it draws a bar on a terminal and is silent elsewhere.

    Args:
        title: before the text.
        started: whether the bar is shown at once; else at the first call, so that a command owns the terminal
            until then.
    """
    err = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    task = bar.add_task(title, total=None)

    def advance(done: int, total: int, text: str = "") -> None:
        bar.start()
        bar.update(task, completed=done, total=total, description=f"{title} {text}".strip())

    if started:
        bar.start()
    try:
        yield advance
    finally:
        bar.stop()
