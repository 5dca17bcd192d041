"""What of a running step is wanted, decided before any tensor is touched."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tracekit.model import Array, Mode
from tracekit.recorder.filters import Filters
from tracekit.recorder.observation import Handle, IndexerObservation, Launch, Observation
from tracekit.recorder.requests import RequestTable


class Choice:
    """The filters of a user, held against the step that runs.

    `shut` says that nothing more of the step is wanted; `names` are the names of the layers' modules;
    `always` and `never` are the layers that are wanted in every step that is not shut, and in none.

    Args:
        filters: what to keep.
        requests: whose names they may ask for.
    """

    def __init__(self, filters: Filters, requests: RequestTable) -> None:
        self.filters = filters
        self.names: dict[int, str] = {}
        self.shut = False
        self._requests = requests
        self._members: tuple[Handle, ...] = ()
        self.always: set[int] = set()
        self.never: set[int] = set()
        self.of_rows = filters.rows is not None or filters.by_request

    def begin(self, step: int, tokens: Mapping[Handle, Array], mode: Mode) -> None:
        """Look at a step whose tokens were added to their requests."""
        self._members = tuple(tokens)
        self.shut = not self.filters.keeps_step(step) or self._no_rows(tokens, mode)

    def wants(self, layer: int) -> bool:
        """Whether any row of a launch of this layer may be wanted."""
        if self.shut or layer in self.never:
            return False
        return layer in self.always or self._decide(layer)

    def take(self, launch: Launch) -> tuple[Launch, int] | None:
        """Return the wanted rows of a launch and how many were left out; None where no row is wanted."""
        seen = launch.describe()
        mask = self._wanted(seen)
        if not mask.any():
            return None
        if mask.all():
            return replace(launch, describe=lambda: seen), 0
        some = seen.take(np.flatnonzero(mask))
        kv = {handle: launch.kv[handle] for handle in some.requests}
        return Launch(launch.layer, kv, some.size, lambda: some), int((~mask).sum())

    def take_indexer(self, seen: IndexerObservation) -> IndexerObservation | None:
        """Return the wanted rows of a launch of an indexer; None where no row is wanted."""
        if not self.of_rows:
            return seen
        mask = self._wanted(seen)
        return seen.take(np.flatnonzero(mask)) if mask.any() else None

    def _wanted(self, seen: Observation | IndexerObservation) -> npt.NDArray[np.bool_]:
        """Which rows of a launch are wanted."""
        requests = np.array([self._keeps(seen.layer, handle) for handle in seen.requests], np.bool_)
        found: npt.NDArray[np.bool_] = requests[seen.request] & self.filters.keeps_positions(seen.positions)
        return found

    def _decide(self, layer: int) -> bool:
        """What `wants` says of a layer, kept where it will always be so."""
        if not self.filters.by_request:
            kept = self.filters.keeps(layer, self._name(layer), "")
            (self.always if kept else self.never).add(layer)
            return kept
        if not self._members:
            return self.filters.keeps(layer, self._name(layer), "")
        return any(self._keeps(layer, handle) for handle in self._members)

    def _keeps(self, layer: int, handle: Handle) -> bool:
        return self.filters.keeps(layer, self._name(layer), self._requests[handle].alias)

    def _name(self, layer: int) -> str:
        return self.names.get(layer, f"layers.{layer}")

    def _no_rows(self, tokens: Mapping[Handle, Array], mode: Mode) -> bool:
        """Whether a step about new tokens has none at a position that is wanted.

        A request without new tokens computes old ones again, at positions that only its launches tell.
        """
        if self.filters.rows is None or mode is Mode.RECOMPUTE or not all(map(len, tokens.values())):
            return False
        ends = [len(self._requests[handle].tokens) for handle in tokens]
        spans = [range(end - len(new), end) for end, new in zip(ends, tokens.values(), strict=True)]
        return self.filters.rows.isdisjoint(position for span in spans for position in span)
