"""Launches that failed after they were let through: they may have written KV already.

A retry is held to what the failed launch was: the same pages, the same bytes. Where the engine gives the
rows up instead (a preemption, a rollback, new weights), what was attempted is forgotten.
"""

from dataclasses import dataclass

from tracekit.gate.launch import Extent
from tracekit.gate.prints import Prints, differing, inputs
from tracekit.gate.refusal import refuse
from tracekit.model import AttentionCall, KVFamily
from tracekit.model.events import (
    Attend,
    Event,
    Evict,
    Finish,
    Migrate,
    NewWeights,
    Pages,
    Preempt,
    Rescale,
    ResetCache,
    Rollback,
    Sleep,
)


@dataclass(frozen=True)
class Attempt:
    """What a failed launch brought for one request and layer: rows, pages by family, prints."""

    first: int
    end: int
    pages: dict[KVFamily, Pages | None]
    prints: Prints

    @property
    def rows(self) -> tuple[int, int]:
        """`first` and `end`."""
        return self.first, self.end


class Attempts:
    """The failed launches that nothing followed yet."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], tuple[Attempt, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def of(self, request: str) -> bool:
        """Whether a launch of a request failed."""
        return any(name == request for name, _ in self._held)

    def copy(self) -> "Attempts":
        """Return them as they are now, to be taken back to."""
        copy = Attempts()
        copy._held = dict(self._held)
        return copy

    def keep(self, before: "Attempts") -> None:
        """Take back what was forgotten since `copy`: the events that gave it up are taken back.

        Where the same rows failed again meanwhile, the first launch counts: the rows were not given up.
        """
        for key, attempts in before._held.items():
            first = {held.rows for held in attempts}
            later = (held for held in self._held.get(key, ()) if held.rows not in first)
            self._held[key] = (*attempts, *later)

    def add(self, event: Attend, call: AttentionCall, spans: list[Extent]) -> None:
        """Remember a launch that failed."""
        prints = inputs(call, spans)
        for span in event.spans:
            mine = {place: value for place, value in prints.items() if place.request == span.request}
            pages = {read.family: read.pages for read in span.reads}
            key = span.request, event.layer
            others = (held for held in self._held.get(key, ()) if held.rows != (span.first, span.end))
            self._held[key] = (*others, Attempt(span.first, span.end, pages, mine))

    def succeeded(self, event: Attend) -> None:
        """Forget what a launch has made good; of a launch that it cuts short, the rest is still awaited."""
        for span in event.spans:
            key = span.request, event.layer
            left = tuple(held for held in self._held.pop(key, ()) if held.end > span.end)
            if left:
                self._held[key] = left

    def forget(self, event: Event) -> None:
        """Forget what an event gives up."""
        if not self._held:
            return
        if isinstance(event, NewWeights | Rescale) or (isinstance(event, Sleep) and not event.keeps_cache):
            self._held.clear()
        elif isinstance(event, ResetCache):
            self._held = {key: held for key, held in self._held.items() if not _void(event, key[1], held)}
        elif isinstance(event, Preempt | Rollback | Finish | Migrate) or (
            isinstance(event, Evict) and event.before is None  # other evictions take rows that were committed
        ):
            self._held = {key: held for key, held in self._held.items() if key[0] != event.request}

    def check(self, event: Attend, call: AttentionCall, spans: list[Extent]) -> None:
        """Hold a launch to the failed ones that it repeats, in the rows that both have.

        Raises:
            GateRefused: `G-RETRY-SLOTS`, `G-RETRY-BYTES`.
        """
        tried = [
            (span, held)
            for span in event.spans
            for held in self._held.get((span.request, event.layer), ())
            if held.first < span.end and span.first < held.end
        ]
        if not tried:
            return
        prints = inputs(call, spans)
        for span, held in tried:
            first, end = max(span.first, held.first), min(span.end, held.end)
            for read in span.reads:
                mine = (
                    _slots(pages, read.family, first, end)
                    for pages in (held.pages.get(read.family), read.pages)
                )
                if len(set(mine)) > 1:
                    where = {"request": span.request, "layer": event.layer, "family": read.family.value}
                    refuse("G-RETRY-SLOTS", "the failed launch wrote elsewhere", **where, position=first)
            for place in differing(held.prints, prints):
                refuse("G-RETRY-BYTES", "other bytes than in the launch that failed", **place.fields)


def _void(event: ResetCache, layer: int, held: tuple[Attempt, ...]) -> bool:
    """Whether a reset of the cache takes the rows of some attempts."""
    families = {family for attempt in held for family in attempt.pages}
    return event.layer in (None, layer) and (event.family is None or event.family in families)


def _slots(pages: Pages | None, family: KVFamily, first: int, end: int) -> tuple[int, tuple[int, ...]] | None:
    """The pages of the rows that positions `first .. end - 1` write; their size, too."""
    if pages is None:
        return None
    lo, hi = first // family.ratio, end // family.ratio
    return pages.rows, pages.table[lo // pages.rows : -(-hi // pages.rows)] if hi > lo else ()
