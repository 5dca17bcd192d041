"""The gate around a differentiable kernel: forward, and the backward of that same kernel, each a transaction.

A training launch is packed rows of whole requests in any order. The forward is committed as a launch of mode
training; the backward is committed as an event that names its forward, and only after its gradients are there
and finite. A backward that fails commits nothing and may be tried again (`retain_graph=True`); in a
`gate.transaction()` that holds for all layers together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tracekit.gate.gate import RequestGate
from tracekit.gate.launch import extents
from tracekit.gate.machine import transition
from tracekit.gate.refusal import refuse
from tracekit.model import (
    AttentionCall,
    Bits,
    Conventions,
    ExecutedIdentity,
    KVFamily,
    KVRows,
    Mode,
    Provenance,
    Ranges,
    Rows,
    Selection,
    scale_to_bits,
)
from tracekit.model.events import Backward
from tracekit.providers.base import Answer, Launch, Tensors
from tracekit.providers.torch_tensors import from_torch

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(q `[T, H, D]`, k `[T, Hkv, D]`, v `[T, Hkv, Dv]`, bool mask `[T, T]`, scale) -> O `[T, H, Dv]`."""


@dataclass(frozen=True)
class Kernel:
    """A differentiable kernel: its backward is what torch recorded of its own forward, and nothing else.

    Args:
        id: its identity; a backward must have the identity of its forward.
        forward: differentiable; row t reads the rows where the mask is True.
    """

    id: str
    forward: Forward


def _eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1)


EAGER = Kernel("torch.eager", _eager)
SDPA = Kernel("torch.sdpa", _sdpa)


def attend(
    gate: RequestGate,
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Rows,
    *,
    layer: int,
    scale: float,
    mode: Mode = Mode.TRAINING,
    model_version: int | None = None,
) -> torch.Tensor:
    """Run causal attention over packed rows through a gate; gradients flow to q, k and v.

    Args:
        gate: the gate.
        kernel: the kernel, forward and backward.
        q: `[T, H, D]`.
        k: `[T, Hkv, D]`, the keys of the same rows.
        v: `[T, Hkv, Dv]`.
        rows: who each row is; each request has all rows from 0 on, in any order.
        layer: 0-based.
        scale: the factor on q.k.
        mode: training, or recompute for activations that are computed again.
        model_version: weights that made q, k and v; None takes those in force.

    Returns:
        O `[T, H, Dv]`.

    Raises:
        GateRefused: the launch may not come next, or its answer is none; in the backward also `G-BACKWARD`
            and gradients that are not finite. Nothing moved.
    """
    call = training_call(q, k, v, rows, layer=layer, scale=scale, mode=mode)
    version = gate.ledger.model_version if model_version is None else model_version
    out: torch.Tensor = _Gated.apply(q, k, v, gate, kernel, call, version)  # type: ignore[no-untyped-call]
    return out


def training_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Rows,
    *,
    layer: int,
    scale: float,
    mode: Mode = Mode.TRAINING,
) -> AttentionCall:
    """Return the logical side of a packed training launch; it reads the rows that it brings.

    Raises:
        GateRefused: `G-ROWS-GAP` where a row in the middle of a request is missing.
    """
    queries, keys, values = (_bits(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    kv, spans = {}, extents(rows)
    for number, (key, _, first, _) in enumerate(spans):
        mine = np.flatnonzero(rows.request == number)
        order = mine[np.argsort(rows.positions[mine], kind="stable")]
        kv[key] = {KVFamily.DENSE: KVRows(keys.take(order), values.take(order), first)}
    positions = rows.positions
    starts = np.array([first for _, _, first, _ in spans], np.int64)[rows.request]
    return AttentionCall(
        layer=layer,
        step=0,
        mode=mode,
        rows=rows,
        q=queries,
        kv=kv,
        sink=None,
        selection=Selection({KVFamily.DENSE: Ranges(starts, positions + 1)}),
        conventions=Conventions(scale_to_bits(scale)),
        provenance=Provenance("torch", "autograd", ExecutedIdentity("autograd")),
    )


def _bits(tensor: torch.Tensor, name: str) -> Bits:
    data, dtype = from_torch(tensor, name)
    return Bits(data.copy(), dtype)  # owned: an optimizer changes the tensor in place


def _mask(rows: Rows) -> torch.Tensor:
    same = rows.request[:, None] == rows.request[None, :]
    return torch.from_numpy(same & (rows.positions[None, :] <= rows.positions[:, None]))


class _Once:
    """The provider of one launch: it keeps what the backward needs."""

    id = "torch.autograd"

    def __init__(self, kernel: Kernel, leaves: tuple[torch.Tensor, ...], call: AttentionCall) -> None:
        self._kernel, self.leaves, self._call = kernel, leaves, call
        self.out: torch.Tensor | None = None

    def run(self, _: Launch) -> Answer:
        mask, scale = _mask(self._call.rows), self._call.conventions.scale
        with torch.enable_grad():
            q, k, v = self.leaves
            self.out = self._kernel.forward(q, k, v, mask, scale)
        bits = _bits(self.out.contiguous(), "out")
        return Answer((Tensors(bits, None),), ExecutedIdentity(self._kernel.id))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gate: RequestGate,
        kernel: Kernel,
        call: AttentionCall,
        version: int,
    ) -> torch.Tensor:
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        once = _Once(kernel, leaves, call)
        wanted = any(x.requires_grad for x in (q, k, v))
        gate.run(call, once, model_version=version, kernel=kernel.id if wanted else "")  # type: ignore[arg-type]
        assert once.out is not None
        ctx.gate, ctx.kernel, ctx.once, ctx.call = gate, kernel, once, call
        ctx.event = Backward(gate.ledger.epoch, kernel.id, version)
        return once.out.detach()

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate: RequestGate = ctx.gate
        ledger = gate.ledger
        transition(ledger, ctx.event)
        _check(ctx.call, "d_out", d_out)
        # The graph is kept until the gradients are good, so that a backward that failed can run again.
        grads = torch.autograd.grad(ctx.once.out, ctx.once.leaves, d_out, retain_graph=True)
        for name, grad in zip(("d_q", "d_k", "d_v"), grads, strict=True):
            _check(ctx.call, name, grad)
        if gate.ledger is not ledger:
            refuse("G-CONCURRENT", "another event was committed meanwhile", layer=ctx.call.layer)
        gate.tell(ctx.event)
        if not gate.within:
            ctx.once = (
                None  # where another layer may still fail, its backward is to run again with the others
            )
        return (*grads, None, None, None, None)


def _check(call: AttentionCall, name: str, tensor: torch.Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        refuse("G-NON-FINITE", f"{name} is not finite", layer=call.layer, tensor=name)
