"""Launches that failed after they were let through: they may have written KV already.

A retry is held to what the failed launch was: the same pages, the same bytes. Where the engine gives the
rows up instead (a preemption, a rollback, new weights), what was attempted is forgotten.
"""

from collections.abc import Mapping
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


_NOTHING: Mapping[tuple[str, int], Attempt] = {}


class Attempts:
    """The failed launches that nothing followed yet."""

    def __init__(self, held: Mapping[tuple[str, int], Attempt] = _NOTHING) -> None:
        self._held = dict(held)

    def __bool__(self) -> bool:
        return bool(self._held)

    def copy(self) -> "Attempts":
        """Return the same attempts, which later ones are not added to."""
        return Attempts(self._held)

    def of(self, request: str) -> bool:
        """Whether a launch of a request failed."""
        return any(name == request for name, _ in self._held)

    def add(self, event: Attend, call: AttentionCall, spans: list[Extent]) -> None:
        """Remember a launch that failed, beside what failed before it: a shorter retry frees no rows."""
        prints = inputs(call, spans)
        for span in event.spans:
            mine = {place: value for place, value in prints.items() if place.request == span.request}
            pages = {read.family: read.pages for read in span.reads}
            first, end = span.first, span.end
            older = self._held.get((span.request, event.layer))
            if older is not None:
                mine = {**mine, **older.prints}
                if older.end >= end:
                    pages = older.pages
                first, end = min(first, older.first), max(end, older.end)
            self._held[span.request, event.layer] = Attempt(first, end, pages, mine)

    def succeeded(self, event: Attend) -> None:
        """Forget what a launch has made good."""
        for span in event.spans:
            self._held.pop((span.request, event.layer), None)

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
        """Hold a launch to the failed one that it repeats, in the rows that both have.

        Raises:
            GateRefused: `G-RETRY-SLOTS`, `G-RETRY-BYTES`.
        """
        tried = [
            (span, held)
            for span in event.spans
            if (held := self._held.get((span.request, event.layer))) is not None
        ]
        if not tried:
            return
        prints = inputs(call, spans)
        for span, held in tried:
            end = min(span.end, held.end)
            for read in span.reads:
                mine = (
                    _slots(pages, read.family, span.first, end)
                    for pages in (held.pages.get(read.family), read.pages)
                )
                if len(set(mine)) > 1:
                    where = {"request": span.request, "layer": event.layer, "family": read.family.value}
                    refuse("G-RETRY-SLOTS", "the failed launch wrote elsewhere", **where, position=span.first)
            for place in differing(held.prints, prints):
                refuse("G-RETRY-BYTES", "other bytes than in the launch that failed", **place.fields)


def _void(event: ResetCache, layer: int, held: Attempt) -> bool:
    """Whether a reset of the cache takes the rows of an attempt."""
    return event.layer in (None, layer) and (event.family is None or event.family in held.pages)


def _slots(pages: Pages | None, family: KVFamily, first: int, end: int) -> tuple[int, tuple[int, ...]] | None:
    """The pages of the rows that positions `first .. end - 1` write; their size, too."""
    if pages is None:
        return None
    lo, hi = first // family.ratio, end // family.ratio
    return pages.rows, pages.table[lo // pages.rows : -(-hi // pages.rows)] if hi > lo else ()
