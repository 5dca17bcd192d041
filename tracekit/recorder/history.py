"""What an engine says that it did, kept until its requests have their keys (docs/gate.md)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tracekit.model import Mode, RequestKey
from tracekit.model.events import Adopt, GateMode
from tracekit.model.history import Entry, Pass, PassBackward, PassRows, Unproven
from tracekit.recorder.observation import Handle

MOST = 500_000
"""Request-steps that are kept: a longer history is more than a trace takes for one text."""

_NOBODY = "the engine's adapter does not follow one"

_MODES = {
    Mode.TRAINING: GateMode.TRAINING,
    Mode.PREFILL: GateMode.PREFILL,
    Mode.DECODE: GateMode.EAGER,
    Mode.RECOMPUTE: GateMode.RECOMPUTE,
}


class Computed(NamedTuple):
    """The rows of one request that a step computes: positions `first .. end - 1`.

    Args:
        first: the first of them.
        end: the position after the last.
        mode: why they are computed; None takes that of the step, or tells it by the tokens. One launch may
            hold a chunk of a prompt beside rows that are decoded.
        cache_version: write epoch of the KV that the request has in this step: what a launch is taken to
            have read where a filter left it out.
        adopt: how it came to the rows before `first`, where it takes them over in this step (a prefix hit);
            requests are handles as text. The giver may compute them in the same launch, and then stands
            before it.
    """

    first: int
    end: int
    mode: Mode | None = None
    cache_version: int = 0
    adopt: Adopt | None = None


class HistoryLog:
    """The entries of a recording. Requests are handles, as text, until `resolve`.

    `lost` says why there is no history: an adapter that does not follow one never begins a pass here. Of a
    history that was followed and lost, one entry that says so is left.
    """

    def __init__(self) -> None:
        self.lost = _NOBODY
        self._entries: list[Entry] = []
        self._rows = 0
        self._open: list[Pass | Adopt] = []
        self._launched: dict[int, bool] = {}
        self._behind: list[Entry] = []

    def begin(
        self, step: int, spans: Mapping[Handle, Computed], modes: Mapping[Handle, Mode], weights: int
    ) -> None:
        """Begin the pass of a step.

        It is told in parts where a request takes over rows that another computes in the same launch: what
        comes first, the adoption, and then the rows behind it.

        Args:
            step: of the trace.
            spans: the rows of each request, in the order in which the engine planned them.
            modes: why they are computed, where a request does not say so itself.
            weights: version of the weights in force.
        """
        if self.lost == _NOBODY:
            self.lost = ""
        self._launched, part = {}, dict[str, PassRows]()
        for handle, span in spans.items():
            if span.end <= span.first:
                continue
            name, mode = str(handle), _MODES[span.mode or modes[handle]]
            if span.adopt is not None:
                if span.adopt.source in part:
                    self._open.append(Pass(step, tuple(part.values()), weights))
                    part = {}
                self._open.append(span.adopt)
            part[name] = PassRows(name, span.first, span.end, mode, span.cache_version)
            self._rows += 1
        if part:
            self._open.append(Pass(step, tuple(part.values()), weights))
        if self._rows > MOST:
            self.lose(f"it is longer than {MOST:,} request-steps")

    def end(self, *, failed: bool) -> None:
        """End the pass that runs, if one does."""
        if failed and sum(isinstance(entry, Pass) for entry in self._open) > 1:
            self.lose("a step failed in which a request reads rows that another computes there")
        for entry in self._open:
            self.tell(self._whole(entry, failed) if isinstance(entry, Pass) else entry)
        self._open = []
        for behind in self._behind:
            self.tell(behind)
        self._behind, self._launched = [], {}

    def _whole(self, entry: Pass, failed: bool) -> Pass:
        """A pass with what became known of it while it ran."""
        again = all(rows.mode is GateMode.RECOMPUTE for rows in entry.rows)
        layers = tuple(sorted(self._launched)) if again else ()
        owing = tuple(sorted(layer for layer, owes in self._launched.items() if owes))
        return replace(entry, failed=failed, layers=layers, owing=owing)

    def launched(self, layer: int, *, owes: bool) -> None:
        """A layer of the pass that runs was launched; whether gradients of the launch will be told of.

        Only from adapters that tell of gradients, or whose recomputed passes are not of all layers.
        """
        self._launched[layer] = self._launched.get(layer, False) or owes

    def backward(self, step: int, layer: int, kernel: str, weights: int, *, retained: bool) -> None:
        """The gradients of a launch of a step were computed; its pass may still run, or be long over."""
        entries = self._behind if self._open else self._entries
        entry = PassBackward(step, (layer,), kernel, weights, retained)
        last = entries[-1] if entries else None
        if isinstance(last, PassBackward) and layer not in last.layers:
            both = replace(last, layers=(*last.layers, layer))
            if both == replace(entry, layers=both.layers):
                entries[-1] = both
                return
        self._rows += 1
        if not self.lost:
            entries.append(entry)

    def tell(self, event: Entry) -> None:
        """Take an event that is no launch; its requests are handles as text."""
        if not self.lost or self.lost == _NOBODY:
            self._entries.append(event)

    def unsaid(self, step: int) -> None:
        """A step begins, and nobody says which rows it computes."""
        if self.lost != _NOBODY:
            self.lose(f"step {step} does not say which rows it computed")

    def lose(self, reason: str) -> None:
        """Something happened that nobody can say in events: there is no history from here on, and so none."""
        if self.lost in ("", _NOBODY):
            self.lost = reason
        self._entries, self._open, self._behind = [], [], []

    def doubt(self, reason: str) -> None:
        """Something of what was told so far is not known; the rest of the history stands."""
        self._entries.append(Unproven(reason))

    def resolve(self, key: Callable[[Handle], RequestKey]) -> tuple[Entry, ...] | None:
        """Return the entries with the requests' keys; None where nobody followed them."""
        if self.lost == _NOBODY or not (self._entries or self.lost):
            return None
        if self.lost:
            return (Unproven(self.lost),)
        return tuple(_named(entry, key) for entry in self._entries)


def _named(entry: Entry, key: Callable[[Handle], RequestKey]) -> Entry:
    if isinstance(entry, PassBackward):
        return entry
    if isinstance(entry, Pass):
        rows = tuple(row._replace(request=str(key(int(row.request)))) for row in entry.rows)
        return replace(entry, rows=rows)
    changed: dict[str, Any] = {}
    for name in ("request", "parent", "source"):
        if getattr(entry, name, ""):
            changed[name] = str(key(int(getattr(entry, name))))
    return replace(entry, **changed)
