"""What a user wants recorded; everything else is counted as filtered, not as missing."""

from collections.abc import Iterable
from dataclasses import dataclass

from tracekit.errors import UsageError


@dataclass(frozen=True)
class Filters:
    """Which calls to keep.

    Args:
        layers: 0-based layers; None keeps all.
        steps: 0-based engine steps; None keeps all.
    """

    layers: frozenset[int] | None = None
    steps: frozenset[int] | None = None

    def keeps(self, layer: int, step: int) -> bool:
        """Whether a call of this layer and step is wanted."""
        return (self.layers is None or layer in self.layers) and (self.steps is None or step in self.steps)


def parse_filters(layers: Iterable[int] | None = None, steps: Iterable[int] | None = None) -> Filters:
    """Check the numbers of a user.

    Raises:
        UsageError: `R-FILTER` for a negative number or an empty list.
    """
    return Filters(_numbers("layers", layers), _numbers("steps", steps))


def _numbers(name: str, numbers: Iterable[int] | None) -> frozenset[int] | None:
    if numbers is None:
        return None
    found = frozenset(int(number) for number in numbers)
    if not found or min(found) < 0:
        raise UsageError(
            f"{name} is a list of numbers from 0, not {sorted(found)}; leave it out to record all of them.",
            rule="R-FILTER",
            name=name,
        )
    return found
