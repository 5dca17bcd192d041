"""What may happen to the requests of an engine: the events of a ledger (docs/gate.md).

An event says what is about to be done, or was done, and nothing about whether it was legal; that is what
`tracekit.gate` decides. Requests are named by any text that is one request's own.

The parts of a launch are named tuples: a gate makes some of them at each call, and they cost a third of a
frozen dataclass.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tracekit.model.kv import KVFamily


class GateMode(StrEnum):
    """Why rows are computed."""

    TRAINING = "training"
    PREFILL = "prefill"
    EAGER = "eager decode"
    GRAPH = "graph decode"
    RECOMPUTE = "recompute"


class Scales(NamedTuple):
    """Which generation of scales each block of quantised KV rows was written with.

    Args:
        rows: rows of one block; 1 where each row has its own scale.
        generations: of block 0, 1, ..., up to the last row of the launch.
    """

    rows: int
    generations: tuple[int, ...]


class Pages(NamedTuple):
    """Where rows lie: row i is row `i % rows` of page `table[i // rows]`.

    Args:
        rows: rows of one page.
        table: the page of rows `0 .. rows - 1`, and so on; more entries than rows need are not looked at.
    """

    rows: int
    table: tuple[int, ...]


class Read(NamedTuple):
    """The KV of one family that a request brings to a launch, its new rows included.

    Args:
        family: the family.
        cache_version: write epoch of the rows.
        first: the oldest row that is held.
        scales: of quantised rows, else None.
        pages: where the rows lie; None where the engine has no pages.
    """

    family: KVFamily
    cache_version: int = 0
    first: int = 0
    scales: Scales | None = None
    pages: Pages | None = None


class Span(NamedTuple):
    """The rows of one request in a launch: positions `first .. end - 1`."""

    request: str
    first: int
    end: int
    mode: GateMode
    reads: tuple[Read, ...]


class GraphUse(NamedTuple):
    """A captured graph and what it is replayed on.

    Args:
        name: the graph.
        addresses: of the buffers that the graph reads and writes, in an order that the caller keeps.
        rows: rows that it was captured for; a replay may fill fewer.
    """

    name: str
    addresses: tuple[int, ...]
    rows: int


class Attend(NamedTuple):
    """One attention launch of one layer.

    Args:
        layer: 0-based layer.
        spans: the rows, request by request, each request once.
        model_version: weight generation that made Q and the new KV rows.
        window: sliding window in tokens, of the families `dense` and `recent`.
        graph: the graph that is replayed, in graph decode only.
        kernel: identity of the kernel whose backward is to follow; empty where none is.
    """

    layer: int
    spans: tuple[Span, ...]
    model_version: int = 0
    window: int | None = None
    graph: GraphUse | None = None
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class Backward:
    """The gradients of one launch were computed.

    Args:
        forward: the epoch that the launch was committed as.
        kernel: identity of the kernel that computed them.
        model_version: weights in force.
        retained: whether the graph was kept, so that they may be computed again.
    """

    forward: int
    kernel: str
    model_version: int = 0
    retained: bool = False


@dataclass(frozen=True, slots=True)
class Preempt:
    """The engine took the KV of a request away; its rows are to be computed again."""

    request: str


@dataclass(frozen=True, slots=True)
class Rollback:
    """The rows from position `to` on are dropped: rejected drafts, or a pass that failed half-way."""

    request: str
    to: int


@dataclass(frozen=True, slots=True)
class Fork:
    """A new request begins with the first `at` rows of a live one (n > 1 samples)."""

    request: str
    parent: str
    at: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """A request begins with `at` rows that are there already: a prefix hit, or a transfer from elsewhere.

    Args:
        request: a new request, or a preempted one.
        at: rows that it takes over.
        model_version: weight generation that those rows were written under.
        source: the request that wrote them; empty where the ledger never saw it (another engine wrote them).
    """

    request: str
    at: int
    model_version: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Evict:
    """KV rows are gone without being replaced.

    Args:
        request: whose rows.
        before: rows below this one of one stream are gone; None: all that is left of a finished or preempted
            request, which the ledger then forgets.
        layer: the layer of the stream.
        family: the family of the stream.
    """

    request: str
    before: int | None = None
    layer: int = 0
    family: KVFamily = KVFamily.DENSE


@dataclass(frozen=True, slots=True)
class Finish:
    """A request has ended; its rows may be adopted until they are overwritten."""

    request: str


@dataclass(frozen=True, slots=True)
class Migrate:
    """The KV of a request is declared good for newer weights (partial rollouts, converted caches)."""

    request: str
    model_version: int


@dataclass(frozen=True, slots=True)
class NewWeights:
    """The weights were updated."""

    model_version: int


@dataclass(frozen=True, slots=True)
class ResetCache:
    """KV written under an older cache version is void.

    Args:
        cache_version: the oldest that is good from now on.
        layer: one layer; None is all.
        family: one family; None is all.
    """

    cache_version: int
    layer: int | None = None
    family: KVFamily | None = None


@dataclass(frozen=True, slots=True)
class Rescale:
    """The scales of quantised KV changed; rows are written with the new generation from now on."""

    generation: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """The engine gives its memory back; KV is lost unless `keeps_cache`."""

    keeps_cache: bool = False


@dataclass(frozen=True, slots=True)
class Wake:
    """The engine has its memory again."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The reader waited for every writer: what was written before is visible from now on."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A graph was captured, or captured again, under the weights in force."""

    graph: GraphUse
    model_version: int = 0


Event = (
    Attend
    | Backward
    | Preempt
    | Rollback
    | Fork
    | Adopt
    | Evict
    | Finish
    | Migrate
    | NewWeights
    | ResetCache
    | Rescale
    | Sleep
    | Wake
    | Fence
    | Capture
)
