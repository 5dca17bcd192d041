"""`layout`: how rows, heads, keys and values lie inside pages changes no bit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tracekit.controls.layout import LayoutOfFirstLaunch
from tracekit.model import AttentionCall
from tracekit.providers.base import Capabilities, Execution, Launch, Provider
from tracekit.providers.placement import Layout, Placement
from tracekit.relations.base import Expectation, Variant


@dataclass(frozen=True)
class PageOrder:
    """The strides of a cache are no part of the answer.

    Args:
        layouts: layouts that the kernel takes, its own first.
    """

    layouts: tuple[Layout, ...] = ()
    id: ClassVar[str] = "layout"
    promise: ClassVar[str] = "a row gives the same bits over every layout of pages that the kernel takes"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def on(self, capabilities: Capabilities) -> "PageOrder":
        """Ask a kernel for the layouts that it takes."""
        return PageOrder(capabilities.layouts)

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a kernel whose layouts are not all the same memory for the KV of the call."""
        if not self.layouts:
            return "the kernel takes no pages"
        return None if self._others(call) else "the KV of the call lies the same way in every layout"

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call over each other layout; two that are the same memory for its KV count once."""
        for layout in self._others(call):
            yield Variant(layout.value, Launch((call,), Execution(placement=Placement(layout=layout))))

    def broken(self) -> Provider:
        """Return a kernel that reads every cache in one layout."""
        return LayoutOfFirstLaunch()

    def _others(self, call: AttentionCall) -> list[Layout]:
        own, *others = self.layouts
        seen: dict[object, Layout] = {None: own, own.memory(call): own}
        for layout in others:
            seen.setdefault(layout.memory(call), layout)
        return [layout for layout in seen.values() if layout is not own]
