"""What a user wants recorded; everything else is counted as filtered, not as missing."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.errors import UsageError


@dataclass(frozen=True)
class Filters:
    """Which query rows to keep. A row is of a layer, a step, a position and a request.

    A glob is held against two names: that of the layer's module, such as `model.layers.3.self_attn`, and the
    engine's own name of the request. A row is kept where one of its names matches one of `include`, if there
    are any, and neither matches one of `exclude`.

    Args:
        layers: 0-based layers; None keeps all.
        steps: 0-based engine steps; None keeps all.
        rows: 0-based positions of query rows; None keeps all. The KV that they read stays.
        include: globs as of `fnmatch`, case counts.
        exclude: likewise.
    """

    layers: frozenset[int] | None = None
    steps: frozenset[int] | None = None
    rows: frozenset[int] | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def by_request(self) -> bool:
        """Whether the name of a request matters."""
        return bool(self.include or self.exclude)

    @property
    def skips_steps(self) -> bool:
        """Whether whole steps may be unwanted."""
        return self.steps is not None or self.rows is not None

    def keeps_step(self, step: int) -> bool:
        """Whether anything of a step is wanted."""
        return self.steps is None or step in self.steps

    def keeps(self, layer: int, name: str, alias: str) -> bool:
        """Whether rows of a request in a layer are wanted.

        Args:
            layer: the layer.
            name: of its module.
            alias: of the request.
        """
        if self.layers is not None and layer not in self.layers:
            return False
        if self.include and not _matches(self.include, name, alias):
            return False
        return not _matches(self.exclude, name, alias)

    def keeps_positions(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of some positions are wanted."""
        if self.rows is None:
            return np.ones(positions.shape, np.bool_)
        return np.isin(positions, np.fromiter(self.rows, np.int64, len(self.rows)))


def parse_filters(
    layers: Iterable[int] | None = None,
    steps: Iterable[int] | None = None,
    rows: Iterable[int] | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
) -> Filters:
    """Check the numbers and globs of a user.

    Raises:
        UsageError: `R-FILTER` for what is no number from 0, an empty list or an empty glob.
    """
    return Filters(
        _numbers("layers", layers),
        _numbers("steps", steps),
        _numbers("rows", rows),
        _globs("include", include),
        _globs("exclude", exclude),
    )


def _matches(globs: tuple[str, ...], name: str, alias: str) -> bool:
    return any(fnmatchcase(name, glob) or fnmatchcase(alias, glob) for glob in globs)


def _numbers(name: str, numbers: Iterable[int] | None) -> frozenset[int] | None:
    if numbers is None:
        return None
    listed = isinstance(numbers, Iterable) and not isinstance(numbers, str)
    given: list[Any] = list(numbers) if listed else [numbers]
    # int() would take 0.5 for 0, and the text "12" for the numbers 1 and 2
    plain = listed and all(isinstance(n, Integral) and not isinstance(n, bool) for n in given)
    found = frozenset(int(n) for n in given) if plain else frozenset[int]()
    if not found or min(found) < 0:
        raise UsageError(
            f"{name} is a list of numbers from 0, not {given}; leave it out to record all of them.",
            rule="R-FILTER",
            name=name,
        )
    return found


def _globs(name: str, globs: str | Iterable[str]) -> tuple[str, ...]:
    found = (globs,) if isinstance(globs, str) else tuple(globs)
    if not all(found):
        raise UsageError(
            f"{name} holds an empty glob; give globs such as 'model.layers.3.*', or leave it out.",
            rule="R-FILTER",
            name=name,
        )
    return found
