"""The ledger: everything that the gate knows of an engine, frozen, with a canonical digest.

States are named tuples because one is made at each commit; nobody changes the mappings in them.
"""

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from tracekit.model.events import GraphUse, Pages, Scales
from tracekit.model.kv import KVFamily

StreamKey = tuple[int, KVFamily]
"""A stream of KV rows: layer and family."""


class Rows(StrEnum):
    """What became of the rows of a stream."""

    LIVE = "live"
    REOPENED = "reopened"
    """Some were dropped, shared or taken over: the next ones may have a newer cache version."""
    LOST = "lost"
    """All were taken away: the next ones must have a newer cache version."""


class Stream(NamedTuple):
    """The KV rows of one request, layer and family. How many there are follows from the request's length.

    Args:
        cache_version: write epoch of the rows.
        first: the oldest row that is held.
        window: sliding window of the layer, where the family has one.
        scales: scale generation of each block, or None.
        pages: where the rows lie, or None.
        shared: rows below this one may lie on pages of another request too.
        rows: what became of them.
    """

    cache_version: int
    first: int = 0
    window: int | None = None
    scales: Scales | None = None
    pages: Pages | None = None
    shared: int = 0
    rows: Rows = Rows.LIVE


class Phase(StrEnum):
    """What a request is doing."""

    TRAINING = "training"
    ACTIVE = "active"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class RequestState(NamedTuple):
    """One request.

    Between two passes `length == ahead` and `done` is empty. In a pass over rows `length .. ahead - 1`
    the streams of `done` have computed them and the others have not.

    Args:
        phase: what it is doing.
        length: rows that all streams have committed; 0 in training, which keeps none.
        ahead: where the open pass ends.
        done: the streams that have committed the open pass.
        known: rows that were computed at least once under `model_version`.
        cached: rows that another request may adopt after this one was preempted or finished.
        closed: whether the first pass is over, so that all streams are known.
        model_version: weight generation of its KV.
        epoch: when it was last written.
        fence: a fence after this epoch is needed before its rows are read; 0 where none is.
        streams: its KV.
    """

    phase: Phase
    length: int
    ahead: int
    done: frozenset[StreamKey]
    known: int
    cached: int
    closed: bool
    model_version: int
    epoch: int
    fence: int
    streams: Mapping[StreamKey, Stream]

    def settled(self) -> "RequestState":
        """Return the request with its first pass over; nothing else says how many layers there are."""
        if self.closed or not self.done:
            return self
        return self._replace(
            length=0 if self.phase is Phase.TRAINING else self.ahead,
            ahead=0 if self.phase is Phase.TRAINING else self.ahead,
            done=frozenset(),
            known=max(self.known, self.ahead),
            closed=True,
        )

    def lost(self) -> "RequestState":
        """Return the request without its rows; they may be adopted until their pages are written over."""
        return self._replace(
            phase=Phase.PREEMPTED,
            length=0,
            ahead=0,
            done=frozenset(),
            cached=self.length,
            streams={key: stream._replace(rows=Rows.LOST) for key, stream in self.streams.items()},
        )


class Pending(NamedTuple):
    """A launch whose backward is to follow."""

    kernel: str
    model_version: int
    layer: int


class Ledger(NamedTuple):
    """The state of an engine.

    Args:
        model_version: weights in force.
        epoch: commits so far.
        fence: epoch of the last fence.
        asleep: whether the engine sleeps.
        scale_generation: scales in force.
        floors: oldest cache version that is good, by layer and family; None in either is all.
        graphs: captured graphs and their weights.
        requests: by name.
        pending: launches whose backward is to follow, by their epoch.
    """

    model_version: int = 0
    epoch: int = 0
    fence: int = 0
    asleep: bool = False
    scale_generation: int = 0
    floors: Mapping[tuple[int | None, KVFamily | None], int] = {}
    graphs: Mapping[str, tuple[GraphUse, int]] = {}
    requests: Mapping[str, RequestState] = {}
    pending: Mapping[int, Pending] = {}

    def floor(self, key: StreamKey) -> int:
        """Return the oldest cache version that is good for a stream."""
        layer, family = key
        places = ((layer, family), (layer, None), (None, family), (None, None))
        return max(self.floors.get(place, 0) for place in places)

    @property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of the whole state as canonical JSON."""
        return hashlib.sha256(canonical(self)).hexdigest()


def canonical(ledger: Ledger) -> bytes:
    """Return a ledger as canonical JSON: ASCII, keys sorted, no spaces."""
    return json.dumps(_plain(ledger), sort_keys=True, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {_name(key): _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(_name(key) for key in value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _name(key: Any) -> str:
    return (
        "/".join("*" if part is None else str(part) for part in key) if isinstance(key, tuple) else str(key)
    )
