"""Who holds which pages of vLLM's cache, so that a prefix hit has a giver.

vLLM finds a prefix by the hash of its tokens and says only which pages it is on. A page that was handed out
again is another page: what is compared is the page and how often it had been handed out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tracekit.recorder.observation import Handle

NULL_PAGE = 0
"""vLLM gives block 0 to nobody, and names it where a window has dropped a page."""

Tables = Sequence[Sequence[int]]
"""The pages of one request, by KV cache group."""

Page = tuple[int, int]
"""A page, and how often it had been handed out."""


@dataclass
class Holding:
    """What one request holds, or held until it ended.

    Args:
        handle: the request.
        pages: by group, in the order of its rows.
        rows: how many it has computed, those of the step that runs included.
        first: the first row of its last launch: a window has dropped rows before it.
        generation: write epoch of its rows.
        weights: version of the weights that they were written under.
        finished: whether the request has ended.
    """

    handle: Handle
    pages: list[list[Page]]
    rows: int
    first: int
    generation: int
    weights: int
    finished: bool = False


@dataclass(frozen=True)
class Group:
    """One KV cache group.

    Args:
        size: tokens of a page.
        windows: sliding windows of its layers, in tokens.
    """

    size: int
    windows: frozenset[int] = frozenset()


class Prefixes:
    """Every request that holds rows, or whose rows may still be there.

    Args:
        groups: of the engine, in the order of its tables; None where rows are never shared.
    """

    def __init__(self, groups: Sequence[Group | None]) -> None:
        self._groups = [(number, group) for number, group in enumerate(groups) if group is not None]
        self._count = len(groups)
        self._handed: dict[int, int] = {}
        self._held: dict[Handle, Holding] = {}
        self._heads: dict[Page, list[Handle]] = {}

    def givers(self, tables: Tables, at: int) -> Iterator[Holding]:
        """Yield who holds the first `at` rows of some tables, on these very pages; who wrote them first."""
        wanted = [
            (number, place, page)
            for number, group in self._groups
            for place, page in enumerate(self._stamped(tables[number][: at // group.size]))
            if page[0] != NULL_PAGE
        ]
        if wanted and all(at % group.size == 0 for _, group in self._groups):
            for held in self._held.values():
                if held.rows >= at and all(_has(held, *page) for page in wanted):
                    yield held

    def keeps_window(self, held: Holding, at: int) -> bool:
        """Whether the windows of a giver still hold what row `at` reads."""
        windows = {window for _, group in self._groups for window in group.windows}
        return all(max(0, held.first - window + 1) <= max(0, at - window + 1) for window in windows)

    def compute(self, held: Holding, tables: Tables, first: int) -> list[Handle]:
        """Take note of the rows of a request up to `held.rows`, of which a step computes those from `first`.

        Args:
            held: the request; its `pages` are filled here.
            tables: its pages as the worker knows them.
            first: the first row that is computed.

        Returns:
            Requests that have ended and lost their first page here: nobody can take their rows over any more.
        """
        gone: list[Handle] = []
        self._held[held.handle] = held
        held.pages.extend([] for _ in range(self._count - len(held.pages)))
        for number, group in self._groups:
            pages, table = held.pages[number], tables[number]
            begun = bool(pages)
            end, fresh = -(-held.rows // group.size), -(-first // group.size)
            pages.extend(self._stamped(table[len(pages) : fresh]))
            for page in table[fresh:end]:
                gone += self._hand_out(page)
            del pages[fresh:]
            pages.extend(self._stamped(table[fresh:end]))
            if pages and not begun and not group.windows:
                self._heads.setdefault(pages[0], []).append(held.handle)
        return gone

    def get(self, handle: Handle) -> Holding | None:
        """Return what a request holds."""
        return self._held.get(handle)

    def finish(self, handle: Handle) -> None:
        """A request has ended; its pages stay until they are handed out again."""
        if handle in self._held:
            self._held[handle].finished = True

    def _stamped(self, pages: Sequence[int]) -> list[Page]:
        return [(page, self._handed.get(page, 0)) for page in pages]

    def _hand_out(self, page: int) -> list[Handle]:
        """A page gets rows of a new owner."""
        times = self._handed.get(page, 0)
        self._handed[page] = times + 1
        gone = []
        for handle in self._heads.pop((page, times), []):
            held = self._held.get(handle)
            if held is not None and held.finished and any(p[:1] == [(page, times)] for p in held.pages):
                del self._held[handle]
                gone.append(handle)
        return gone


def _has(held: Holding, number: int, place: int, page: Page) -> bool:
    pages = held.pages[number]
    return place < len(pages) and pages[place] == page
