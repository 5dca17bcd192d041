"""`padding`: what a launch holds beside its rows changes no bit of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tracekit.controls.padding import PaddingForgotten
from tracekit.model import AttentionCall
from tracekit.providers.base import Capabilities, Execution, Launch, Provider
from tracekit.providers.placement import Padding, Placement
from tracekit.relations.base import Expectation, Variant

ADDED = {Padding.ROWS: (1, 7, 64), Padding.HEADS: (1, 4), Padding.REQUESTS: (1, 5)}
"""Odd numbers move every row off its place; the larger ones cross the sizes of tiles."""


@dataclass(frozen=True)
class Padded:
    """Nobody's slots, heads and requests are nobody's business.

    Args:
        kinds: what can be added to a launch of the kernel.
    """

    kinds: frozenset[Padding] = frozenset()
    id: ClassVar[str] = "padding"
    promise: ClassVar[str] = "a row gives the same bits with padding around the launch"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def on(self, capabilities: Capabilities) -> "Padded":
        """Ask a kernel for the padding that it takes."""
        return Padded(capabilities.padding)

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a kernel whose launches can be padded."""
        return None if self.kinds else "the kernel takes no padding"

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call with each kind of padding, and with all kinds at once.

        Padding holds queries of the call and reads nothing; added heads read what their KV head holds.
        """
        kinds = [kind for kind in Padding if kind in self.kinds]
        for kind in kinds:
            for count in ADDED[kind]:
                per = " of each KV head" if kind is Padding.HEADS else ""
                yield _variant(f"{count} {kind.value}{per} added", call, {kind: count})
        if len(kinds) > 1:
            yield _variant("all of them added", call, {kind: ADDED[kind][0] for kind in kinds})

    def broken(self) -> Provider:
        """Return a kernel that takes the first slots and heads of a padded launch for its own."""
        return PaddingForgotten()


def _variant(name: str, call: AttentionCall, padding: dict[Padding, int]) -> Variant:
    return Variant(name, Launch((call,), Execution(placement=Placement(padding=padding))))
