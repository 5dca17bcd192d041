"""`page-size`: how many rows a page holds changes no bit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tracekit.controls.page_size import SizeOfFirstLaunch
from tracekit.model import AttentionCall
from tracekit.providers.base import Capabilities, Execution, Launch, Provider
from tracekit.providers.placement import Placement
from tracekit.relations.base import Expectation, Variant


@dataclass(frozen=True)
class PageSize:
    """Where a page ends is no part of the answer.

    Args:
        sizes: rows of a page that the kernel takes, ascending.
    """

    sizes: tuple[int, ...] = ()
    id: ClassVar[str] = "page-size"
    promise: ClassVar[str] = "a row gives the same bits over pages of every size that the kernel takes"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def on(self, capabilities: Capabilities) -> "PageSize":
        """Ask a kernel for the sizes that it takes."""
        return PageSize(capabilities.page_sizes)

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a kernel that takes pages of two sizes."""
        if not self.sizes:
            return "the kernel takes no pages"
        return None if len(self.sizes) > 1 else f"the kernel takes pages of {self.sizes[0]} rows only"

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call over pages of each size, in the order of requests, behind a null page."""
        for size in self.sizes:
            placement = Placement(page_size=size)
            name = f"pages of {size} row{'s' if size > 1 else ''}"
            yield Variant(name, Launch((call,), Execution(placement=placement)))

    def broken(self) -> Provider:
        """Return a kernel that finds rows by the page size of its first launch."""
        return SizeOfFirstLaunch()
