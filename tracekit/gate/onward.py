"""The usual launch, in one look: a request goes on where it ended, over KV that is as it was.

Nearly every call of an engine that decodes is one. Whatever else a launch may be, legal or not, `attend`
looks at rule by rule; it gives the same ledger for the usual ones too, in three times the time.
"""

from tracekit.gate.state import Ledger, Phase, RequestState, Rows, Stream, StreamKey
from tracekit.model.events import Attend, GateMode, Span
from tracekit.model.kv import KVFamily

WINDOWED = (KVFamily.DENSE, KVFamily.RECENT)
"""Families whose rows a sliding window drops; compressed rows stay."""

# A member of an enumeration costs five times a name of the module.
_ACTIVE, _LIVE = Phase.ACTIVE, Rows.LIVE
_PREFILL, _EAGER, _GRAPH = GateMode.PREFILL, GateMode.EAGER, GateMode.GRAPH
_NONE: frozenset[StreamKey] = frozenset()


class Onward:
    """A launch, as far as its requests have it in common.

    Args:
        ledger: the ledger before it; weights, graph and sleep of the event are checked already.
        event: the launch.
        epoch: of its commit.
    """

    __slots__ = ("_before", "_behind", "_epoch", "_fence", "_keys", "_modes", "_streams", "_version")

    def __init__(self, ledger: Ledger, event: Attend, epoch: int) -> None:
        self._epoch, self._fence, self._version = epoch, ledger.fence, event.model_version
        self._modes: tuple[GateMode, ...] = (_PREFILL, _EAGER) if event.graph is None else (_GRAPH,)
        if ledger.floors:
            self._modes = ()  # some KV is void, and each stream is to be looked at
        layer, window = event.layer, event.window
        self._streams = [
            ((layer, read.family), read.family, window if read.family in WINDOWED else None)
            for read in event.spans[0].reads
        ]
        self._keys = frozenset([key for key, _, _ in self._streams])
        self._before, self._behind = _NONE, self._keys

    def after(self, request: RequestState | None, span: Span) -> RequestState | None:
        """Return a request after its rows of the launch; None where the launch is not the usual one."""
        if request is None:
            return None
        phase, length, ahead, done, known, cached, closed, version, _, fence, streams = request
        _, first, end, mode, reads = span
        if (
            phase is not _ACTIVE
            or not closed
            or version != self._version
            or fence > self._fence
            or not 0 < length == first < end
            or mode not in self._modes
            or not reads
            or len(reads) != len(self._keys)
        ):
            return None
        if done is not self._before:  # as a rule, the requests of a launch have done the same layers
            self._before, self._behind = done, done | self._keys
        behind = self._behind
        if done and (end != ahead or len(behind) != len(done) + len(reads)):
            return None  # it is another pass, or these streams have computed it
        changed: dict[StreamKey, Stream] | None = None
        for (key, family, window), (mine, cache_version, oldest, scales, pages) in zip(
            self._streams, reads, strict=True
        ):
            held = streams.get(key)
            if mine is not family or held is None or scales is not None or pages is not None:
                return None
            if held == (cache_version, oldest, window, None, None, 0, _LIVE):
                continue
            moved = window is not None and held[1] < oldest <= first - window + 1
            if not moved or held != (cache_version, held[1], window, None, None, 0, _LIVE):
                return None
            changed = changed or dict(streams)
            changed[key] = Stream(cache_version, oldest, window)
        if len(behind) == len(streams):
            length, known, behind = end, max(known, end), _NONE
        return RequestState(
            phase,
            length,
            end,
            behind,
            known,
            cached,
            closed,
            version,
            self._epoch,
            fence,
            streams if changed is None else changed,
        )
