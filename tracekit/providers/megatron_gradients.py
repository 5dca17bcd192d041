"""The backward of a launch of `DotProductAttention`: what torch recorded of its own forward."""

import numpy as np
import torch

from tracekit.model import Array, AttentionCall, Bits, DType, Gradients, KVFamily, KVRows
from tracekit.providers.megatron_launch import Arguments
from tracekit.providers.torch_tensors import from_torch, to_torch


def leaves(arguments: Arguments) -> list[torch.Tensor]:
    """Return what a launch may have gradients of: query, key, value, and the sink where there is one."""
    sink = [] if arguments.sink is None else [arguments.sink]
    return [arguments.query, arguments.key, arguments.value, *sink]


def gradients(call: AttentionCall, arguments: Arguments, out: torch.Tensor) -> Gradients:
    """Return the gradients of a launch from the dO of its call; rows of padding have none.

    Args:
        call: with `grads.d_out`.
        arguments: of the launch; all of `leaves` wanted gradients.
        out: O `[sq, b, np * hn]`, with its graph.
    """
    assert call.grads is not None
    length, batch = out.shape[:2]
    given = call.grads.d_out
    slots = np.zeros((batch * length, *given.shape[1:]), given.data.dtype)
    slots[arguments.row_slots] = given.data
    d_out = to_torch(Bits(slots, given.dtype)).view(batch, length, -1).transpose(0, 1)
    d_q, d_k, d_v, *d_sink = torch.autograd.grad(out, leaves(arguments), d_out.to(out.dtype))
    keys, values = (_by_slot(grad) for grad in (d_k, d_v))
    d_kv = {}
    for key, at in zip(call.rows.requests, arguments.kv_slots, strict=True):
        held = call.kv[key][KVFamily.DENSE]
        parts = keys.take(at), values.take(at)  # Megatron has two tensors, whatever the call has
        d_kv[key] = {KVFamily.DENSE: KVRows(*parts, held.first, held.generation)}
    sink = None
    if d_sink:
        words = Bits(*from_torch(d_sink[0], "the gradient of the sink")).to_float32()
        sink = Bits.from_float32(words, DType.FLOAT32)
    rows: Array = arguments.row_slots
    return Gradients(given, _by_slot(d_q).take(rows), d_kv, sink)


def _by_slot(grad: torch.Tensor) -> Bits:
    """A gradient `[s, b, h, d]` as slots `[b * s, h, d]`."""
    data, dtype = from_torch(grad, "a gradient")
    return Bits(data.swapaxes(0, 1).reshape(-1, *data.shape[2:]), dtype)
