"""Logical selection: which KV rows each query row read, in the order in which the kernel read them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall
from tracekit.model.bits import Array
from tracekit.model.kv import KVFamily


def _frozen(array: Array, dtype: type[np.generic], name: str) -> Array:
    copy = np.array(array, dtype, copy=True)
    copy.flags.writeable = False
    if copy.ndim != 1:
        raise InvalidCall(f"{name} is one-dimensional, not {list(copy.shape)}.", rule="M-SEL-SHAPE")
    return copy


@dataclass(frozen=True, eq=False)
class Ranges:
    """Each query row reads the contiguous rows `lo <= id < hi`; empty where `hi <= lo`.

    Args:
        lo: int64 `[T]`.
        hi: int64 `[T]`.
    """

    lo: npt.NDArray[np.int64]
    hi: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lo", _frozen(self.lo, np.int64, "lo"))
        object.__setattr__(self, "hi", _frozen(self.hi, np.int64, "hi"))
        if self.lo.shape != self.hi.shape or (self.rows and self.lo.min() < 0):
            raise InvalidCall("a range has lo and hi of one length, lo at least 0.", rule="M-SEL-RANGE")

    @property
    def rows(self) -> int:
        """T."""
        return int(self.lo.size)

    def row(self, t: int) -> npt.NDArray[np.int64]:
        """Return the ids that query row t reads, ascending."""
        return np.arange(self.lo[t], max(self.lo[t], self.hi[t]), dtype=np.int64)

    def take(self, order: Array) -> "Ranges":
        """Return the query rows in another order."""
        return Ranges(self.lo[order], self.hi[order])


@dataclass(frozen=True, eq=False)
class Lists:
    """Each query row reads a list of rows, in executed order; holes (-1) are not stored.

    Args:
        ids: int64 `[n]`, the lists of all query rows one after the other.
        offsets: int64 `[T + 1]`, list t is `ids[offsets[t]:offsets[t + 1]]`.

    Raises:
        InvalidCall: `M-SEL-OFFSETS`, `M-SEL-NEGATIVE`, `M-SEL-DUPLICATE`.
    """

    ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", _frozen(self.ids, np.int64, "ids"))
        object.__setattr__(self, "offsets", _frozen(self.offsets, np.int64, "offsets"))
        offsets = self.offsets
        if (
            offsets.size < 1
            or offsets[0] != 0
            or offsets[-1] != self.ids.size
            or (np.diff(offsets) < 0).any()
        ):
            raise InvalidCall("offsets rise from 0 to the number of ids.", rule="M-SEL-OFFSETS")
        if self.ids.size and self.ids.min() < 0:
            raise InvalidCall("an id is below 0; leave holes out of a list.", rule="M-SEL-NEGATIVE")
        owner = np.repeat(np.arange(self.rows), np.diff(offsets))
        order = np.lexsort((self.ids, owner))
        twice = (np.diff(self.ids[order]) == 0) & (np.diff(owner[order]) == 0)
        if twice.any():
            at = int(order[int(np.argmax(twice))])
            raise InvalidCall(
                f"query row {int(owner[at])} selects KV row {int(self.ids[at])} twice; its keys are a set.",
                rule="M-SEL-DUPLICATE",
                row=int(owner[at]),
                id=int(self.ids[at]),
            )

    @property
    def rows(self) -> int:
        """T."""
        return int(self.offsets.size - 1)

    def row(self, t: int) -> npt.NDArray[np.int64]:
        """Return the ids that query row t reads, in executed order."""
        return self.ids[self.offsets[t] : self.offsets[t + 1]]

    def take(self, order: Array) -> "Lists":
        """Return the query rows in another order."""
        lists = [self.row(int(t)) for t in order]
        return Lists.of(lists)

    @classmethod
    def of(cls, lists: list[npt.NDArray[np.int64]]) -> "Lists":
        """Build from one array of ids a query row."""
        lengths = np.array([len(ids) for ids in lists], np.int64)
        ids = np.concatenate([np.zeros(0, np.int64), *lists])
        return cls(ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


@dataclass(frozen=True, eq=False)
class Selection:
    """What each query row read, family by family.

    Args:
        families: one entry a family; the order of the mapping is the order in which the kernel read
            the families (compressed rows first in vLLM, recent rows first in transformers).
    """

    families: Mapping[KVFamily, Ranges | Lists]

    def __post_init__(self) -> None:
        object.__setattr__(self, "families", dict(self.families))
        if not self.families:
            raise InvalidCall("a selection names at least one KV family.", rule="M-SEL-EMPTY")
        if len({part.rows for part in self.families.values()}) != 1:
            raise InvalidCall("every family selects for the same number of query rows.", rule="M-SEL-ROWS")

    @property
    def rows(self) -> int:
        """T."""
        return next(iter(self.families.values())).rows

    def row(self, t: int) -> Iterator[tuple[KVFamily, npt.NDArray[np.int64]]]:
        """Yield family and ids that query row t reads, in executed order."""
        for family, part in self.families.items():
            yield family, part.row(t)

    def counts(self) -> npt.NDArray[np.int64]:
        """Return int64 `[T]`, the number of keys of each query row over all families."""
        total = np.zeros(self.rows, np.int64)
        for part in self.families.values():
            total += np.diff(part.offsets) if isinstance(part, Lists) else np.maximum(part.hi - part.lo, 0)
        return total

    def take(self, order: Array) -> "Selection":
        """Return the query rows in another order."""
        return Selection({family: part.take(order) for family, part in self.families.items()})
