"""`page-ids`: which pages hold the KV of a request, and in which order, changes no bit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tracekit.controls.page_ids import StaleTable
from tracekit.model import AttentionCall
from tracekit.providers.base import Capabilities, Execution, Launch, Provider
from tracekit.providers.placement import Placement
from tracekit.relations.base import Expectation, Variant, rng

GAPS = 3


@dataclass(frozen=True)
class PageIds:
    """The name of a page is no part of the answer.

    Args:
        paged: whether the kernel takes pages.
    """

    paged: bool = False
    id: ClassVar[str] = "page-ids"
    promise: ClassVar[str] = "a row gives the same bits whichever pages hold its KV"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def on(self, capabilities: Capabilities) -> "PageIds":
        """Ask a kernel that takes pages."""
        return PageIds(bool(capabilities.page_sizes))

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a kernel that takes pages."""
        return None if self.paged else "the kernel takes no pages"

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the pages in order behind a hot null page, in three random orders, and scattered with gaps.

        The gaps, the null page and what a request leaves free of its last page hold numbers too.
        """
        random = rng(seed, self.id)
        named = {"behind a null page": Placement()}
        for number in range(1, 4):
            named[f"permutation {number}"] = Placement(shuffle=int(random.integers(2**31)))
        named["scattered with gaps"] = Placement(shuffle=int(random.integers(2**31)), gaps=GAPS)
        for name, placement in named.items():
            yield Variant(name, Launch((call,), Execution(placement=placement)))

    def broken(self) -> Provider:
        """Return a kernel that reads by the block table of its first launch."""
        return StaleTable()
