"""What one TKA-1 launch gets and gives, as bit patterns in numpy arrays (docs/tka1.md: S2, S3, S14).

`Inputs` is checked and brought into its canonical form when it is made, so every form of the kernel starts
from the same, legal launch.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall
from tracekit.model.bits import DType
from tracekit.providers.tka1.border import LEAF, canonical_lists, checked_ranges

Words = npt.NDArray[Any]
"""Bits of q, k, v and O in the container of their dtype: uint16, or uint32 for binary32."""

U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

__all__ = ["LEAF", "FamilyInput", "Inputs", "Lists", "Outputs", "Partials", "Ranges"]

DTYPES = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
"""Dtypes of a launch. FP8 rows are decoded first, exactly (docs/canonical.md)."""


@dataclass(frozen=True, eq=False)
class Ranges:
    """Query row t sees the row ids `lo[t] <= id < hi[t]`; none when `hi[t] <= lo[t]`. Both int64 [T]."""

    lo: I64
    hi: I64


@dataclass(frozen=True, eq=False)
class Lists:
    """Query row t sees the set `ids[offsets[t]:offsets[t + 1]]`; -1 is a hole, the order means nothing.

    Args:
        ids: int64 [n].
        offsets: int64 [T + 1], from 0 to n, never falling.
    """

    ids: I64
    offsets: I64


@dataclass(frozen=True, eq=False)
class FamilyInput:
    """The rows of one family and who sees them.

    Args:
        keys: per request, bits [N, Hkv, D].
        values: per request, bits [N, Hkv, Dv]; the same objects as `keys` where the model shares them.
        first: per request, the row id of array row 0, because a sliding window drops the start.
        selection: the row ids that each query row sees, absolute (not counted from `first`).
    """

    keys: tuple[Words, ...]
    values: tuple[Words, ...]
    first: tuple[int, ...]
    selection: Ranges | Lists


@dataclass(frozen=True, eq=False)
class Inputs:
    """One launch. After construction lists are strictly ascending and without holes (S3).

    Args:
        q: bits [T, H, D].
        request: int32 [T]; which entry of the families' tuples a query row belongs to.
        families: one (number 0) or two (0 = compressed, 1 = recent or dense).
        sink: binary32 bits [H] of a natural-log logit, or None.
        scale_bits: binary32 bits of the factor of a score.
        dtype: of q, of all keys and values, and of O: bfloat16, float16 or float32.

    Raises:
        InvalidCall: `S2-...` for a wrong dtype, shape, head count or request number; `S3-...` for a
            duplicate, a row id below -1 or outside the rows that were given, or broken offsets.
    """

    q: Words
    request: I32
    families: tuple[FamilyInput, ...]
    sink: U32 | None
    scale_bits: int
    dtype: DType = DType.BFLOAT16

    def __post_init__(self) -> None:
        _require(
            self.dtype in DTYPES,
            "S2-DTYPE",
            f"a launch of {self.dtype}; TKA-1 takes {', '.join(DTYPES)}. Decode narrower rows first.",
        )
        _array("q", self.q, self.dtype.container, 3)
        rows, heads, _ = self.q.shape
        _array("request", self.request, np.int32, 1, rows)
        if self.sink is not None:
            _array("sink", self.sink, np.uint32, 1, heads)
        _require(
            0 <= self.scale_bits < 2**32,
            "S2-SCALE",
            f"the scale has the bits {self.scale_bits:#x}; binary32 has 32.",
        )
        _require(
            len(self.families) in (1, 2),
            "S3-FAMILIES",
            f"a launch has one or two families, not {len(self.families)}.",
        )
        requests = len(self.families[0].keys)
        _require(requests > 0, "S2-REQUEST", "a launch needs the rows of at least one request.")
        inside = (self.request >= 0) & (self.request < requests)
        if not inside.all():  # the message costs more than the question
            _require(
                False, "S2-REQUEST", f"a query row names request {self.request[~inside][:1]} of {requests}."
            )
        families = tuple(_family(i, f, self) for i, f in enumerate(self.families))
        for name, value in (
            ("q", np.ascontiguousarray(self.q)),
            ("request", np.ascontiguousarray(self.request)),
            ("sink", None if self.sink is None else np.ascontiguousarray(self.sink)),
            ("families", families),
        ):
            object.__setattr__(self, name, value)

    @property
    def kv_heads(self) -> int:
        """Hkv."""
        return int(self.families[0].keys[0].shape[1])

    @property
    def value_dim(self) -> int:
        """Dv."""
        return int(self.families[0].values[0].shape[2])

    def take(self, rows: npt.ArrayLike) -> "Inputs":
        """Return the launch of some query rows, in this order."""
        order = np.asarray(rows, np.int64)
        families = tuple(replace(f, selection=_take(f.selection, order)) for f in self.families)
        return replace(self, q=self.q[order], request=self.request[order], families=families)


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a launch gives.

    Args:
        out: bits of the launch's dtype [T, H, Dv].
        lse: binary32 bits [T, H], natural log, without the sink.
        lse_with_sink: binary32 bits [T, H], natural log, with the sink.
    """

    out: Words
    lse: U32
    lse_with_sink: U32


@dataclass(frozen=True, eq=False)
class Partials:
    """Whole rows before the sink and the division (S10): numerators are acc * 2^m, denominators l * 2^m.

    Args:
        acc: binary32 bits [T, H, Dv].
        l: binary32 bits [T, H]; NaN in a poisoned row.
        m: int32 [T, H]; -2^30 in a row without a finite key.
    """

    acc: U32
    l: U32  # noqa: E741 - the name in the specification
    m: I32


def _take(selection: Ranges | Lists, order: I64) -> Ranges | Lists:
    if isinstance(selection, Ranges):
        return Ranges(selection.lo[order], selection.hi[order])
    starts, counts = selection.offsets[order], np.diff(selection.offsets)[order]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    at = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, counts)
    return Lists(selection.ids[at], offsets)


def _family(number: int, family: FamilyInput, inputs: Inputs) -> FamilyInput:
    """Check one family against the launch and bring its selection into the canonical form."""
    count, head = len(inputs.families[0].keys), inputs.q.shape[2]
    lengths = (len(family.keys), len(family.values), len(family.first))
    _require(
        lengths == (count, count, count),
        "S2-REQUEST",
        f"family {number} holds {lengths} requests, not {count}.",
    )
    for name, arrays in (("keys", inputs.families[0].keys), ("values", inputs.families[0].values)):
        _array(f"{name} of family 0, request 0", arrays[0], inputs.dtype.container, 3)
    heads, width = inputs.kv_heads, inputs.value_dim
    _require(
        heads > 0 and inputs.q.shape[1] % heads == 0,
        "S2-HEADS",
        f"{inputs.q.shape[1]} heads do not divide by {heads}.",
    )
    _require(head > 0 and width > 0, "S2-SHAPE", f"D is {head} and Dv is {width}; both must be positive.")
    keys, values = [], []
    for r, (k, v, first) in enumerate(zip(family.keys, family.values, family.first, strict=True)):
        _array(f"keys of family {number}, request {r}", k, inputs.dtype.container, 3, None, heads, head)
        _array(f"values of family {number}, request {r}", v, inputs.dtype.container, 3, len(k), heads, width)
        _require(
            0 <= first <= first + len(k) <= LEAF << 26,
            "S3-OUTSIDE",
            f"family {number}, request {r}: rows start at {first} and are {len(k)}; ids go from 0 to 2^33.",
        )
        keys.append(np.ascontiguousarray(k))
        values.append(keys[-1] if v is k else np.ascontiguousarray(v))
    first_row = np.array(family.first, np.int64)[inputs.request]
    end_row = first_row + np.array([len(k) for k in keys], np.int64)[inputs.request]
    selection: Ranges | Lists
    if isinstance(family.selection, Ranges):
        for name, array in (("lo", family.selection.lo), ("hi", family.selection.hi)):
            _array(f"{name} of family {number}", array, np.int64, 1, len(inputs.q))
        selection = Ranges(
            *checked_ranges(family.selection.lo, family.selection.hi, first_row, end_row, number)
        )
    else:
        _array(f"ids of family {number}", family.selection.ids, np.int64, 1)
        _array(f"offsets of family {number}", family.selection.offsets, np.int64, 1, len(inputs.q) + 1)
        selection = Lists(
            *canonical_lists(family.selection.ids, family.selection.offsets, first_row, end_row, number)
        )
    return replace(family, keys=tuple(keys), values=tuple(values), selection=selection)


def _require(true: bool, rule: str, message: str, **fields: Any) -> None:
    if not true:
        raise InvalidCall(f"{message} Rule: docs/tka1.md, {rule[:2]}.", rule=rule, **fields)


def _array(name: str, array: npt.NDArray[Any], dtype: npt.DTypeLike, ndim: int, *shape: int | None) -> None:
    if array.dtype != dtype:  # the message costs more than the question
        _require(False, "S2-DTYPE", f"{name} is {array.dtype}, not {np.dtype(dtype)}.")
    fits = array.ndim == ndim and all(
        want in (None, got) for want, got in zip(shape, array.shape, strict=False)
    )
    if not fits:
        _require(False, "S2-SHAPE", f"{name} has the shape {array.shape}, wanted {shape or ndim}.")
