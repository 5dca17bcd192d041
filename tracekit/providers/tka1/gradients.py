"""What a backward gets and gives (docs/tka1.md, S16)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall
from tracekit.model.bits import DType
from tracekit.providers.tka1 import arithmetic as ar
from tracekit.providers.tka1.inputs import DTYPES, I64, LEAF, U32, Inputs, Partials, Words


@dataclass(frozen=True, eq=False)
class Backward:
    """A launch and the gradient of its O.

    Args:
        inputs: the launch.
        positions: int64 [T], the position of each row in its request; none twice.
        d_out: bits [T, H, Dv].
        dtype: of dO: bfloat16, float16 or float32, whatever the launch has.
        rows: the rows before S10, if they are there; needed where this process holds some of the keys only.
        unfinished: leave out the add that ends a sum, so that what other queries or keys add can be merged.

    Raises:
        InvalidCall: `S16-DTYPE`, `S16-SHAPE`, `S16-POSITION`.
    """

    inputs: Inputs
    positions: I64
    d_out: Words
    dtype: DType = DType.BFLOAT16
    rows: Partials | None = None
    unfinished: bool = False

    def __post_init__(self) -> None:
        rows, heads, _ = self.inputs.q.shape
        fits = self.dtype in DTYPES and self.d_out.dtype == self.dtype.container
        _require(
            fits, "S16-DTYPE", f"dO is {self.dtype} in {self.d_out.dtype}; it may be {', '.join(DTYPES)}"
        )
        shape = (rows, heads, self.inputs.value_dim)
        _require(
            self.d_out.shape == shape, "S16-SHAPE", f"dO has the shape {self.d_out.shape}, wanted {shape}"
        )
        _require(
            self.rows is None or self.rows.acc.shape == shape,
            "S16-SHAPE",
            f"the rows before S10 are of another launch than dO {shape}",
        )
        at = np.ascontiguousarray(self.positions)
        fits = at.dtype == np.int64 and at.shape == (rows,)
        fits = fits and (not rows or (at.min() >= 0 and at.max() < LEAF << 26))
        _require(fits, "S16-POSITION", f"a position from 0 to 2^33 is needed for each of {rows} rows")
        places = np.stack([self.inputs.request.astype(np.int64), at])
        _require(
            np.unique(places, axis=1).shape[1] == rows,
            "S16-POSITION",
            "two rows of a request have one position, and the order of their terms would be open",
        )
        object.__setattr__(self, "positions", at)
        object.__setattr__(self, "d_out", np.ascontiguousarray(self.d_out))

    def take(self, rows: npt.ArrayLike) -> "Backward":
        """Return the backward of some query rows, in this order."""
        order = np.asarray(rows, np.int64)
        held = self.rows and Partials(self.rows.acc[order], self.rows.l[order], self.rows.m[order])
        inputs = self.inputs.take(order)
        return replace(
            self, inputs=inputs, positions=self.positions[order], d_out=self.d_out[order], rows=held
        )


@dataclass(frozen=True, eq=False)
class FamilyGradients:
    """Of one family, per request: binary32 bits of the shapes of its keys and values.

    Where keys and values are one tensor both are the same array, dK + dV.
    """

    keys: tuple[U32, ...]
    values: tuple[U32, ...]


@dataclass(frozen=True, eq=False)
class Gradients:
    """What a backward gives, binary32 bits.

    Args:
        d_q: [T, H, D].
        families: one a family of the launch.
        d_sink: [requests, H], or None without a sink; `sum_of_sinks` adds the requests up.
    """

    d_q: U32
    families: tuple[FamilyGradients, ...]
    d_sink: U32 | None


def room(backward: Backward) -> Gradients:
    """Return unwritten arrays for the gradients of a launch."""
    inputs = backward.inputs
    families = []
    for family in inputs.families:
        keys = tuple(np.empty(k.shape, np.uint32) for k in family.keys)
        values = tuple(
            key if v is k else np.empty(v.shape, np.uint32)
            for k, v, key in zip(family.keys, family.values, keys, strict=True)
        )
        families.append(FamilyGradients(keys, values))
    sinks = (len(inputs.families[0].keys), inputs.q.shape[1])
    return Gradients(
        np.empty(inputs.q.shape, np.uint32),
        tuple(families),
        None if inputs.sink is None else np.empty(sinks, np.uint32),
    )


def sum_of_sinks(d_sink: U32, order: Sequence[int]) -> U32:
    """Return the gradient of the sink, bits [H]: one add a request, in an order that is given (S16.5).

    Args:
        d_sink: [requests, H].
        order: the requests, ascending by what names them and not by their place in a batch.

    Raises:
        InvalidCall: `S16-ORDER` when the order does not name each request once.
    """
    _require(
        sorted(order) == list(range(len(d_sink))), "S16-ORDER", f"{list(order)} of {len(d_sink)} requests"
    )
    total = np.zeros(d_sink.shape[1], np.float32)
    for request in order:
        total += d_sink[request].view(np.float32)
    return ar.one_nan(total)


def _require(true: bool, rule: str, message: str) -> None:
    if not true:
        raise InvalidCall(f"{message}. Rule: docs/tka1.md, S16.", rule=rule)
