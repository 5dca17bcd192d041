"""Which thread's forward of a model is recorded: one at a time, since their calls would mix in one step."""

import threading
from threading import get_ident

OVERLAP = (
    "another thread's forward of the model was running, and one at a time is recorded; run them one after "
    "the other."
)


class OneForward:
    """The forward that is recorded, by its thread. Others that begin meanwhile are refused, and counted.

    `missed` is how many were refused and not told of yet.
    """

    def __init__(self) -> None:
        self.missed = 0
        self._owner: int | None = None
        self._refused: set[int] = set()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Whether the forward that begins in this thread is the one that is recorded."""
        me = get_ident()
        with self._lock:
            if self._owner in (None, me):
                self._owner = me
                return True
            self._refused.add(me)
            self.missed += 1
            return False

    def refused(self) -> bool:
        """Whether the forward that ends in this thread was refused."""
        me = get_ident()
        with self._lock:
            refused = me in self._refused
            self._refused.discard(me)
            return refused

    def leave(self) -> None:
        """The forward that is recorded has ended, and all of it is written down."""
        with self._lock:
            self._owner = None

    def elsewhere(self) -> bool:
        """Whether this thread is not that of the forward that is recorded, or its own one was refused."""
        owner, me = self._owner, get_ident()
        return (owner is not None and owner != me) or me in self._refused
