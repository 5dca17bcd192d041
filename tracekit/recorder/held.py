"""What a recording holds until its end: launches as owned copies, and the KV that they read, once a row."""

from collections.abc import Iterator
from dataclasses import replace

from tracekit.errors import TracekitError
from tracekit.model import AttentionCall, IndexerCall, KVFamily, Mode
from tracekit.recorder.arena import Arena
from tracekit.recorder.assemble import Derive, attention_call, indexer_call
from tracekit.recorder.following import Following
from tracekit.recorder.kept import Kept, KeptIndexer
from tracekit.recorder.observation import IndexerObservation, LateGradients, Launch
from tracekit.recorder.requests import RequestTable


class Held:
    """Launches that wait until the requests have their keys.

    `arena` is where their copies lie; `late` are the gradients that were waited for, once `calls` has run.

    Args:
        requests: of the recording.
        budget: most bytes of captured rows; None is no limit.
    """

    def __init__(self, requests: RequestTable, budget: int | None) -> None:
        self.arena = Arena()
        self.budget = budget
        self.late: list[LateGradients] = []
        self._requests = requests
        self._rows = 0
        self._kept: list[Kept] = []
        self._indexers: list[KeptIndexer] = []
        self._following = Following(requests, self.arena)

    @property
    def count(self) -> int:
        """Launches of attention so far."""
        return len(self._kept)

    @property
    def size(self) -> int:
        """Bytes of captured rows so far."""
        return self._rows + self._following.stored

    def fits(self, size: int) -> bool:
        """Whether so many bytes more stay within the budget."""
        return self.budget is None or self.size + size <= self.budget

    def keep(self, step: int, mode: Mode, launch: Launch) -> int:
        """Keep a launch, and return how many bytes of KV rows were new.

        Raises:
            Unsupported: `R-KV-CHANGED`.
        """
        before = self._following.stored
        kv = self._following.observe(step, launch.layer, launch.kv, launch.describe)
        self._rows += launch.size
        self._kept.append(Kept(step, launch.layer, mode, launch.describe, kv, launch.size))
        return self._following.stored - before

    def keep_indexer(self, step: int, seen: IndexerObservation) -> None:
        """Keep a launch of an indexer.

        Raises:
            Unsupported: `R-KV-CHANGED`.
            InvalidCall: `R-POSITION`.
        """
        token_ids = self._requests.tokens_of(seen)
        read = {handle: {KVFamily.INDEX: rows} for handle, rows in seen.keys.items()}
        extents = self._following.observe(step, seen.layer, read, lambda: seen)
        keys = {handle: families[KVFamily.INDEX] for handle, families in extents.items()}
        self._rows += seen.size
        self._indexers.append(KeptIndexer(step, replace(seen, keys={}), token_ids, keys))

    def calls(
        self, rank: int, derive: Derive | None
    ) -> Iterator[tuple[int, Kept, AttentionCall | TracekitError]]:
        """Yield the number of each launch from 1 on, the launch, and its call or why it is none."""
        for number, kept in enumerate(self._kept, 1):
            try:
                seen = kept.describe()
                if seen.gradients is not None:
                    self.late.append(seen.gradients)
                yield number, kept, attention_call(kept, seen, self._requests, rank, derive)
            except TracekitError as error:
                yield number, kept, error

    def indexer_calls(self) -> Iterator[tuple[KeptIndexer, IndexerCall | TracekitError]]:
        """Yield each launch of an indexer, and its call or why it is none."""
        for kept in self._indexers:
            try:
                yield kept, indexer_call(kept, self._requests)
            except TracekitError as error:
                yield kept, error
