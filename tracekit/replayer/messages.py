"""What goes between the replay and the child process in which a kernel runs."""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall, ProviderFailed
from tracekit.model import (
    Array,
    AttentionCall,
    Bits,
    DType,
    ExecutedIdentity,
    Gradients,
    IndexerCall,
    KVFamily,
    KVRows,
    RequestKey,
    Rows,
)
from tracekit.providers import indexers
from tracekit.providers.base import Answer, Capabilities, Launch, Provider, Tensors
from tracekit.providers.indexers import IndexerProvider
from tracekit.providers.registry import create, is_own
from tracekit.relations.base import Relation
from tracekit.relations.indexers import IndexerRelation
from tracekit.verdict import ClaimId


@dataclass(frozen=True)
class Named:
    """A provider by name."""

    spec: str
    indexer: ClassVar[bool] = False

    def make(self) -> Provider:
        """Make it, in the child.

        A module of the user may stand in the working folder; it is looked for there last, so that no file
        of that folder hides a module of anybody else.
        """
        if is_own(self.spec):
            sys.path.append(str(Path.cwd()))
        return create(self.spec)


@dataclass(frozen=True)
class Broken:
    """The broken twin of a relation."""

    relation: Relation | IndexerRelation

    @property
    def indexer(self) -> bool:
        """Whether it is one of an indexer."""
        return isinstance(self.relation, IndexerRelation)

    def make(self) -> Provider | IndexerProvider:
        """Make it, in the child."""
        return self.relation.broken()


@dataclass(frozen=True)
class NamedIndexer:
    """An indexer by name."""

    name: str
    indexer: ClassVar[bool] = True

    def make(self) -> IndexerProvider:
        """Make it, in the child."""
        return indexers.create(self.name)


Source = Named | Broken | NamedIndexer


@dataclass(frozen=True)
class Description:
    """What a provider says of itself; an indexer has no capabilities, it refuses call by call."""

    id: str
    capabilities: Capabilities | None
    advertised: frozenset[ClaimId]
    identity: ExecutedIdentity


@dataclass(frozen=True, eq=False)
class Answered:
    """The answers to the calls of one launch, one after the other, each row with its identity.

    Args:
        requests: the requests of the rows.
        request: int32 `[n]`, index into `requests`.
        positions: int64 `[n]`.
        out: `[n, H, Dv]`.
        lse: FP32 `[n, H]`, or None where the kernel gives none.
        executed: what ran.
        d_q: `[n, H, D]`, or None where no backward ran, like the others.
        d_kv: gradients of KV, of the requests that one call of the launch holds.
        d_sink: FP32 `[H]`, where the launch is one call.
        free: what the variant may legally change: names of these tensors.
        schedule: in which way, as `Answer` says it.
    """

    requests: tuple[RequestKey, ...]
    request: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    out: Bits
    lse: Bits | None
    executed: ExecutedIdentity
    d_q: Bits | None = None
    d_kv: Mapping[RequestKey, Mapping[KVFamily, KVRows]] = field(default_factory=dict)
    d_sink: Bits | None = None
    free: frozenset[str] = frozenset()
    schedule: str | None = None

    def aligned(self, rows: Rows) -> tuple[Array, Array]:
        """Return int64 `[m]` places among the answers, and int64 `[m]` the row of `rows` at each.

        Companions, which are rows of other requests, are left out. Ascending by row of the trace.
        """
        as_they_stand = self.requests == rows.requests and np.array_equal(self.request, rows.request)
        if as_they_stand and np.array_equal(self.positions, rows.positions):
            every = np.arange(rows.count)
            return every, every
        number = {key: index for index, key in enumerate(rows.requests)}
        mine = np.array([number.get(key, -1) for key in self.requests], np.int64)[self.request]
        # Positions by their rank, for a product of requests and positions need not fit into 64 bits.
        ranks = np.unique(np.concatenate([rows.positions, self.positions]))
        known = rows.request * np.int64(ranks.size) + np.searchsorted(ranks, rows.positions)
        order = np.argsort(known)
        wanted = mine * np.int64(ranks.size) + np.searchsorted(ranks, self.positions)
        found = order[np.minimum(np.searchsorted(known, wanted, sorter=order), order.size - 1)]
        places = np.flatnonzero((mine >= 0) & (known[found] == wanted))
        places = places[np.argsort(found[places], kind="stable")]
        return places, found[places]


def gather(launch: Launch, answer: Answer) -> Answered:
    """Check an answer against its launch and put it in one piece.

    Raises:
        ProviderFailed: `P-ANSWER`, an answer is missing or has another shape or dtype than its call.
    """
    if not isinstance(answer, Answer) or not isinstance(answer.tensors, (tuple, list)):
        raise _wrong(f"an object of type {type(answer).__name__[:80]}")
    if len(answer.tensors) != len(launch.calls):
        raise _wrong(f"{len(answer.tensors)} answers to {len(launch.calls)} calls")
    for call, tensors in zip(launch.calls, answer.tensors, strict=True):
        if not isinstance(tensors, Tensors) or not all(
            isinstance(bits, Bits) for bits in (tensors.out, tensors.lse) if bits is not None
        ):
            raise _wrong(f"an object of type {type(tensors).__name__[:80]} for a call")
        out = (call.num_rows, call.num_heads, call.value_dim)
        if tensors.out.shape != out or tensors.out.dtype is not call.dtype:
            raise _wrong(f"O {tensors.out} where {call.dtype} {list(out)} was asked for")
        if tensors.lse is not None and (
            tensors.lse.shape != out[:2] or tensors.lse.dtype is not DType.FLOAT32
        ):
            raise _wrong(f"an LSE {tensors.lse} where float32 {list(out[:2])} was asked for")
        if launch.execution.grad and call.grads is not None:
            _check_gradients(call, tensors.grads)
    requests: dict[RequestKey, int] = {}
    request = []
    for call in launch.calls:
        numbers = [requests.setdefault(key, len(requests)) for key in call.rows.requests]
        request.append(np.array(numbers, np.int32)[call.rows.request])
    lse = [tensors.lse.data for tensors in answer.tensors if tensors.lse is not None]
    return Answered(
        tuple(requests),
        np.concatenate(request),
        np.concatenate([call.rows.positions for call in launch.calls]),
        Bits(np.concatenate([tensors.out.data for tensors in answer.tensors]), launch.calls[0].dtype),
        Bits(np.concatenate(lse), DType.FLOAT32) if len(lse) == len(launch.calls) else None,
        answer.executed,
        *_gradients(launch, answer),
        schedule=answer.schedule,
    )


def _check_gradients(call: AttentionCall, grads: Gradients | None) -> None:
    """Refuse an answer to a call with dO that lacks a gradient, or has one of another shape."""
    if not isinstance(grads, Gradients) or grads.d_q is None or (call.sink is None) != (grads.d_sink is None):
        raise _wrong("not every gradient of a call with dO")
    if any(set(grads.d_kv.get(key, {})) < set(call.selection.families) for key in call.rows.requests):
        raise _wrong("not the gradient of all KV of a call with dO")
    try:
        replace(call, grads=grads)
    except InvalidCall as error:
        raise _wrong(f"gradients that do not fit: {error}") from error


def _gradients(
    launch: Launch, answer: Answer
) -> tuple[Bits | None, Mapping[RequestKey, Mapping[KVFamily, KVRows]], Bits | None]:
    """The gradients of a launch in one piece: what is summed over calls is none of one call, and left out."""
    found = [tensors.grads for tensors in answer.tensors]
    grads = [one for one in found if one is not None]
    d_q = [one.d_q for one in grads if one.d_q is not None]
    if not launch.execution.grad or len(d_q) != len(found):
        return None, {}, None
    counts = Counter(key for call in launch.calls for key in call.rows.requests)
    d_kv = {key: dict(rows) for one in grads for key, rows in one.d_kv.items() if counts[key] == 1}
    whole = Bits(np.concatenate([bits.data for bits in d_q]), d_q[0].dtype)
    return whole, d_kv, grads[0].d_sink if len(grads) == 1 else None


def _wrong(what: str) -> ProviderFailed:
    return ProviderFailed(
        f"the kernel gave {what}; a provider answers every row of every call.", rule="P-ANSWER"
    )


# Requests of the parent; the reply is `Reply`, or a `TracekitError`.


@dataclass(frozen=True)
class Open:
    """Make a provider, a new one; reply `Description`."""

    source: Source


@dataclass(frozen=True, eq=False)
class Take:
    """Take a call to work on; reply None."""

    call: AttentionCall | IndexerCall


@dataclass(frozen=True)
class Refuses:
    """Ask why the provider refuses the call; reply a clause or None."""


@dataclass(frozen=True)
class Rounds:
    """Ask where the provider rounds on the call; reply the dtypes of scores and of P."""


@dataclass(frozen=True)
class Baseline:
    """Run the call as it stands, or as a relation wants its baseline; reply `Answered`."""

    threads: int
    relation: Relation | None = None


@dataclass(frozen=True)
class Begin:
    """Begin with the variants of the call; reply None."""

    relation: Relation | IndexerRelation
    seed: int
    threads: int


@dataclass(frozen=True)
class Next:
    """Run the next variant; reply its name and `Answered`, or None after the last."""


Message = Open | Take | Refuses | Rounds | Baseline | Begin | Next


_SLACK = 1 << 20
_CHOSEN = 8
"""Bytes of one choice of an indexer: an id and a score."""

_MORE_ROWS = 64
"""Times the rows of a call that its largest variant may have, companions counted; no claim comes near."""


def most_bytes(message: Message, call: AttentionCall | IndexerCall | None) -> int:
    """Return how many bytes the reply to a message may have."""
    if call is None or not isinstance(message, (Baseline, Next)):
        return _SLACK
    if isinstance(call, IndexerCall):
        return _SLACK + _MORE_ROWS * (call.num_rows + 1) * (call.k * _CHOSEN + 256)
    row = call.num_heads * (call.value_dim * call.dtype.container.itemsize + 4) + 256
    most = _SLACK + _MORE_ROWS * (call.num_rows + 1) * row
    if call.grads is None:
        return most
    held = [rows for families in call.kv.values() for rows in families.values()]
    kv = sum(rows.keys.size + rows.value_bits.size for rows in held)
    return most + 4 * _MORE_ROWS * (call.q.size + call.num_heads + kv)


def replies(message: Message) -> type | tuple[type, ...]:
    """Return the types that a reply to a message may have, errors aside."""
    match message:
        case Open():
            return Description
        case Refuses():
            return (str, type(None))
        case Rounds():
            return tuple
        case Baseline():
            return Answered
        case Next():
            return (tuple, type(None))
        case _:
            return type(None)
