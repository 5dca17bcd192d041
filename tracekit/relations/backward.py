"""`backward`: gradients from the recorded dO depend on no batch, no order, and no row that sees nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from tracekit.controls.backward import SumsInArrival
from tracekit.model import Array, AttentionCall, Bits, Gradients, KVFamily, Lists, Ranges, Selection
from tracekit.providers.base import Capabilities, Execution, Launch, Provider
from tracekit.relations.arrange import by_request, foreign, join, orders
from tracekit.relations.base import Expectation, Variant, rng

SUMS = frozenset({"d_kv", "d_sink"})
"""Gradients that are sums over the query rows of a launch."""

_TRAINING = Execution(grad=True)


@dataclass(frozen=True)
class BackwardOrder:
    """dQ is fixed per row; dK, dV and dsink by which queries of a request there are, and by nothing else.

    A row alone, or a chunk, legally gives other sums, so only its dQ is compared.

    Args:
        grad: whether the kernel gives gradients.
    """

    grad: bool = False
    id: ClassVar[str] = "backward"
    promise: ClassVar[str] = (
        "dQ of a row, and dK, dV and dsink of a request with all its rows, give the same bits in any batch"
    )
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def on(self, capabilities: Capabilities) -> "BackwardOrder":
        """Ask a kernel that gives gradients."""
        return BackwardOrder(capabilities.grad)

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a kernel that gives gradients, and a recorded dO."""
        if not self.grad:
            return "the kernel gives no gradients"
        return "the trace holds no gradient of O" if call.grads is None else None

    def base(self, call: AttentionCall) -> Launch:
        """Return the call with its dO, forward and backward."""
        assert call.grads is not None
        return Launch((replace(call, grads=Gradients(call.grads.d_out)),), _TRAINING)

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call again, its rows in other orders, in company, alone, with padding, in chunks."""
        yield Variant("again", self.base(call))
        for name, order in orders(call.num_rows, rng(seed, self.id)):
            yield Variant(name, Launch((taken(call, order),), _TRAINING))
        beside = _with(join([foreign(call), call]), [_d_out(call), _d_out(call)])
        yield Variant("beside other requests", Launch((beside,), _TRAINING), frozenset({"d_sink"}))
        blind = _with(join([call, _seeing_nothing(call)]), [_d_out(call), _d_out(call)])
        yield Variant("with rows that see nothing", Launch((blind,), _TRAINING))
        requests = by_request(call)
        alone = tuple(taken(call, rows) for rows in requests)
        if len(alone) > 1:
            yield Variant("each request alone", Launch(alone, _TRAINING), frozenset({"d_sink"}))
        halves = (rows[part] for rows in requests for part in (slice(None, None, 2), slice(1, None, 2)))
        chunks = tuple(taken(call, rows) for rows in halves if rows.size)
        yield Variant("every other row", Launch(chunks, _TRAINING), SUMS)

    def broken(self) -> Provider:
        """Return a kernel that adds gradients in the order in which rows arrive."""
        return SumsInArrival()


def taken(call: AttentionCall, order: Array) -> AttentionCall:
    """Return some rows of a call in another order, dO with them."""
    return _with(call.take(order), [_d_out(call).take(order)])


def _with(call: AttentionCall, d_out: list[Bits]) -> AttentionCall:
    whole = Bits(np.concatenate([bits.data for bits in d_out]), d_out[0].dtype)
    return replace(call, grads=Gradients(whole))


def _d_out(call: AttentionCall) -> Bits:
    assert call.grads is not None
    return call.grads.d_out


def _seeing_nothing(call: AttentionCall) -> AttentionCall:
    """Padding: rows of other requests that read no key, dO and all."""
    families: dict[KVFamily, Ranges | Lists] = {}
    for family, part in call.selection.families.items():
        zero = np.zeros(call.num_rows, np.int64)
        empty = Lists(zero[:0], np.zeros(call.num_rows + 1, np.int64))
        families[family] = Ranges(zero, zero) if isinstance(part, Ranges) else empty
    return replace(foreign(call), selection=Selection(families))
