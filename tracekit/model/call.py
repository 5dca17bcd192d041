"""`AttentionCall`: one attention launch of one layer, in the logical words of the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from tracekit.model.bits import Array, Bits, DType
from tracekit.model.call_rules import check_call
from tracekit.model.conventions import Conventions
from tracekit.model.kv import KVFamily, KVRows
from tracekit.model.launch_plan import LaunchPlan
from tracekit.model.provenance import Provenance
from tracekit.model.rows import RequestKey, Rows
from tracekit.model.selection import Selection


class Mode(StrEnum):
    """Why the launch was made."""

    TRAINING = "training"
    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"

    __hash__ = str.__hash__
    """That of an enumeration is written in Python, and each look into a table by mode asks for it."""


class Origin(StrEnum):
    """Who made an output: the engine's kernel, or tracekit from the inputs.

    A derived output is never evidence about a kernel.
    """

    EXECUTED = "executed"
    DERIVED = "derived"


@dataclass(frozen=True, eq=False)
class Output:
    """O `[T, H, Dv]` or LSE `[T, H]` with its origin."""

    bits: Bits
    origin: Origin

    def take(self, order: Array) -> "Output":
        """Return the rows in another order."""
        return Output(self.bits.take(order), self.origin)


@dataclass(frozen=True, eq=False)
class Gradients:
    """dO going in, gradients coming out; each None where it was not recorded.

    Args:
        d_out: `[T, H, Dv]`; bfloat16, float16 or float32, as each of them.
        d_q: `[T, H, D]`.
        d_kv: per request and family, the rows and shapes of its keys and values.
        d_sink: float32 `[H]`.
    """

    d_out: Bits
    d_q: Bits | None = None
    d_kv: Mapping[RequestKey, Mapping[KVFamily, KVRows]] = field(default_factory=dict)
    d_sink: Bits | None = None


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention launch of one layer.

    Args:
        layer: 0-based layer.
        step: 0-based engine step (one forward of the model).
        rank: rank of the process in its group.
        mode: why it was made.
        rows: the T query rows in executed order.
        q: `[T, H, D]`, as the kernel saw it (after norm and RoPE, padded heads removed).
        kv: KV rows per request and family; every request of `rows` has every family of `selection`.
        sink: FP32 `[H]`, natural-log logit that joins the denominator only, or None.
        selection: the keys of each row, as executed.
        out: O, or None where it was not recorded.
        lse: LSE, or None where it was not recorded.
        conventions: what the numbers mean.
        provenance: which kernel ran.
        launch: the physical side, or None where the engine did not fill it.
        grads: gradients, or None.

    Raises:
        InvalidCall: a rule of `tracekit.model.call_rules`.
    """

    layer: int
    step: int
    mode: Mode
    rows: Rows
    q: Bits
    kv: Mapping[RequestKey, Mapping[KVFamily, KVRows]]
    sink: Bits | None
    selection: Selection
    conventions: Conventions
    provenance: Provenance
    out: Output | None = None
    lse: Output | None = None
    rank: int = 0
    launch: LaunchPlan | None = None
    grads: Gradients | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv", {key: dict(families) for key, families in self.kv.items()})
        check_call(self)

    @property
    def num_rows(self) -> int:
        """T."""
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        """H, the query heads."""
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        """D, the width of a key."""
        return self.q.shape[2]

    @cached_property
    def value_dim(self) -> int:
        """Dv, the width of a value."""
        return self.any_kv.value_bits.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """Hkv, the key heads; query head h reads key head `h // (H / Hkv)`."""
        return self.any_kv.keys.shape[1]

    @property
    def any_kv(self) -> KVRows:
        """KV rows of the call, for the sizes that all of them share."""
        return next(iter(next(iter(self.kv.values())).values()))

    @property
    def dtype(self) -> DType:
        """The dtype of Q, KV and O."""
        return self.q.dtype

    def take(self, order: Array) -> "AttentionCall":
        """Return the call with some of its rows, in another order.

        Q, selection and outputs move with the rows; KV is addressed by request and row, so it does not
        move, but requests that lose all rows are dropped. The launch plan describes the old order and is
        dropped too, and so are gradients.
        """
        order = np.asarray(order, np.int64)
        rows = self.rows.take(order)
        return replace(
            self,
            rows=rows,
            q=self.q.take(order),
            kv={key: self.kv[key] for key in rows.requests},
            selection=self.selection.take(order),
            out=None if self.out is None else self.out.take(order),
            lse=None if self.lse is None else self.lse.take(order),
            launch=None,
            grads=None,
        )

    def with_kv(self, kv: Mapping[RequestKey, Mapping[KVFamily, KVRows]]) -> "AttentionCall":
        """Return the call over other KV rows."""
        return replace(self, kv=kv, launch=None)

    def visible_kv(self) -> "AttentionCall":
        """Return the call with only the KV rows that its own rows may see: what a shorter run would hold."""
        kv: dict[RequestKey, dict[KVFamily, KVRows]] = {}
        for index, key in enumerate(self.rows.requests):
            last = int(self.rows.positions[self.rows.request == index].max())
            kv[key] = {family: rows.until(family.visible(last)) for family, rows in self.kv[key].items()}
        return self.with_kv(kv)
