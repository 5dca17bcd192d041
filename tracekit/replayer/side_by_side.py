"""Traces side by side: each thread has a desk of its own, and what comes out has the order of the traces.

The threads wait for their children most of the time. Children are ended by the thread that started them, for
Linux ends a child with that thread.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from threading import Event, Thread
from typing import TypeVar

from tracekit.replayer.desk import Desk

Result = TypeVar("Result")
_LOOK = 0.05
"""Seconds between two looks for children that were started while a replay was halted."""


@contextmanager
def side_by_side(
    tasks: Sequence[Callable[[Desk], Result]], desk_of: Callable[[ExitStack, Event], Desk], jobs: int
) -> Iterator[Iterator[Result]]:
    """Yield what the tasks return, in their order; leaving the context ends those that still run.

    What a task raises is raised where its result would have come.

    Args:
        tasks: each is given the desk of its thread.
        desk_of: makes a desk that is closed with a stack; after its event no child starts any more.
        jobs: the most tasks at a time; one runs in the thread of the caller.
    """
    if jobs == 1:
        with ExitStack() as stack:
            desk = desk_of(stack, Event())
            yield (task(desk) for task in tasks)
        return
    halted = Event()
    results: list[Future[Result]] = [Future() for _ in tasks]
    waiting = deque(zip(tasks, results, strict=True))
    desks: list[Desk] = []

    def work() -> None:
        with ExitStack() as stack:
            desk = desk_of(stack, halted)
            desks.append(desk)
            while (one := _next(waiting)) is not None:
                task, result = one
                try:
                    result.set_result(task(desk))
                except BaseException as error:  # it is the caller's, as it would be without threads
                    result.set_exception(error)

    threads = [Thread(target=work, name=f"replay {number}", daemon=True) for number in range(jobs)]
    for thread in threads:
        thread.start()
    try:
        yield (result.result() for result in results)
    finally:
        finished = all(result.done() for result in results)
        waiting.clear()
        halted.set()
        while any(thread.is_alive() for thread in threads):
            for desk in () if finished else tuple(desks):
                desk.kill()
            for thread in threads:
                thread.join(_LOOK)


def _next(
    waiting: deque[tuple[Callable[[Desk], Result], Future[Result]]],
) -> tuple[Callable[[Desk], Result], Future[Result]] | None:
    """Take a task from the left; None where another thread took the last one."""
    try:
        return waiting.popleft()
    except IndexError:
        return None
