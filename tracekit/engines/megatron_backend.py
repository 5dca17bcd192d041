"""TKA-1 as the core attention of a Megatron model, forward.

`on_tka1(spec)` switches a layer spec; everything else of the model stays as it is. TKA-1 gives the same bits
on every machine, but its definition speaks of logical rows, so padding and other documents of a batch place
must not shift them. A core attention gets no tokens: what stands in a slot is read from the mask, or from the
cumulative lengths of a packed launch, which `DotProductAttention` does not take and this module does.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from tracekit.engines.megatron_mask import executed_mask, read_selection, slots_of_mask
from tracekit.engines.megatron_points import Kind
from tracekit.engines.megatron_step import Slots, packed_slots
from tracekit.engines.torch_bits import borrow
from tracekit.errors import Unsupported
from tracekit.model import Array, Bits, DType, Ranges, scale_to_bits
from tracekit.providers import tka1
from tracekit.providers.torch_tensors import to_torch


def on_tka1(spec: Any) -> Any:
    """Return a layer or block spec of Megatron with TKA-1 in the place of every core attention.

    Args:
        spec: a `ModuleSpec`, as `get_gpt_layer_local_spec()` makes it, or submodules with `layer_specs`; it
            is changed in place.

    Raises:
        Unsupported: `M-SPEC` when it has no core attention.
    """
    if not _switch(spec):
        raise Unsupported(
            f"{type(spec).__name__} names no core_attention; give the spec of a layer or of a block.",
            rule="M-SPEC",
        )
    return spec


def _switch(spec: Any) -> int:
    """Replace every core attention below a spec, and say how many there were."""
    layers = [*(getattr(spec, "layer_specs", None) or [])]
    submodules = getattr(spec, "submodules", None)
    below = [] if submodules is None else [submodules, *vars(submodules).values()]
    found = 0
    for part in (*layers, *below):
        if part is not None and hasattr(part, "core_attention"):
            part.core_attention = Tka1Attention
            found += 1
        elif part is not submodules or layers:
            found += _switch(part)
    return found


class Tka1Attention(DotProductAttention):  # type: ignore[misc]
    """`DotProductAttention` with another forward: its parameters, checkpoints and arguments are the same."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Return O `[sq, b, np * hn]`, or `[t, np * hn]` of a packed launch; see `attend`."""
        return self.attend(
            query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
        )[0]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return O and the LSE, FP32 `[sq, b, np]` or `[t, np]`, natural, sink not counted.

        Args:
            query: `[sq, b, np, hn]`, or `[t, np, hn]` of a packed launch.
            key: `[sq, b, ng, hn]` or `[t, ng, hn]`.
            value: likewise.
            attention_mask: bool `[b or 1, 1, sq, sq]`, True where a key is hidden; None is causal.
            attn_mask_type: not used, as in `DotProductAttention`.
            attention_bias: refused.
            packed_seq_params: cumulative lengths of a packed launch.

        Raises:
            Unsupported: `M-TKA1` for a dtype that TKA-1 does not take, a bias, dropout or a gradient;
                `M-MASK-...`, `M-PACKED`.
        """
        _refuse(self, (query, key, value), attention_bias)
        packed = packed_seq_params is not None
        given = {"attention_mask": attention_mask}
        mask, window = executed_mask(Kind.TKA1, self, given, packed)
        slots = (
            packed_slots(packed_seq_params, (1, query.shape[0]))
            if packed
            else slots_of_mask(mask, window, query.shape[1], query.shape[0])
        )
        scale = self.softmax_scale * (self.scale_mask_softmax.scale or 1.0)
        out, lse = attend(
            query, key, value, slots, mask=mask, window=window, scale=scale, sink=self.softmax_offset
        )
        return out.reshape(*out.shape[:-2], -1), lse


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Return O `[sq, b, np, hn]` of TKA-1 on tensors in Megatron's layout, without a module.

    Args:
        query: `[sq, b, np, hn]`.
        key: `[sq, b, ng, hn]`.
        value: likewise.
        mask: bool `[b or 1, 1, sq, sq]`, True where a key is hidden; None is causal.
        scale: factor on q.k; None is `hn ** -0.5`.
        sink: `[np]` logits that join the denominator.
        window: tokens that a row reads at most, where there is no mask.

    Raises:
        Unsupported: `M-MASK-...`.
    """
    slots = slots_of_mask(mask, window, query.shape[1], query.shape[0])
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return attend(query, key, value, slots, mask=mask, window=window, scale=factor, sink=sink)[0]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: Slots,
    *,
    mask: torch.Tensor | None,
    window: int | None,
    scale: float,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return O, with the axes of the query, and its LSE; both are zero where padding stands."""
    part = read_selection(mask, window, slots)
    if isinstance(part, Ranges):
        selection: tka1.Ranges | tka1.Lists = tka1.Ranges(part.lo, part.hi)
    else:
        selection = tka1.Lists(part.ids, part.offsets)
    q, keys, values = (_flat(tensor, slots) for tensor in (query, key, value))
    dtype = borrow(query, "query").dtype
    held = [slots.slots_of(index) for index in range(slots.requests)]
    family = tka1.FamilyInput(
        tuple(np.ascontiguousarray(keys[where]) for where in held),
        tuple(np.ascontiguousarray(values[where]) for where in held),
        (0,) * len(held),
        selection,
    )
    answer = tka1.attention(
        tka1.Inputs(
            q=np.ascontiguousarray(q[slots.row_slots]),
            request=slots.request,
            families=(family,),
            sink=None if sink is None else _sink_bits(sink),
            scale_bits=scale_to_bits(scale),
            dtype=dtype,
        )
    )
    out = to_torch(Bits(_unflat(answer.out, slots), dtype))
    lse = to_torch(Bits(_unflat(answer.lse, slots), DType.FLOAT32))
    return out.to(query.device), lse.to(query.device)


def _flat(tensor: torch.Tensor, slots: Slots) -> Array:
    data = borrow(tensor, "operand").data
    return data if slots.packed else data.swapaxes(0, 1).reshape(-1, *data.shape[2:])


def _unflat(rows: Array, slots: Slots) -> Array:
    """Rows `[T, ...]` in their slots, `[S, B, ...]` or `[t, ...]`; zero elsewhere."""
    flat = np.zeros((slots.batch * slots.length, *rows.shape[1:]), rows.dtype)
    flat[slots.row_slots] = rows
    return flat if slots.packed else flat.reshape(slots.batch, slots.length, *rows.shape[1:]).swapaxes(0, 1)


def _sink_bits(sink: torch.Tensor) -> npt.NDArray[np.uint32]:
    borrowed = borrow(sink, "softmax_offset")
    return Bits(borrowed.data.copy(), borrowed.dtype).to_float32().view(np.uint32)


def _refuse(module: Any, tensors: tuple[torch.Tensor, ...], bias: torch.Tensor | None) -> None:
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    sink = module.softmax_offset
    wanting = [*tensors, *([sink] if isinstance(sink, torch.Tensor) else [])]
    checks = (
        (len(kinds) > 1, f"has {', '.join(sorted(kinds))} operands; q, k and v must have one dtype"),
        (
            not kinds <= set(tka1.DTYPES),
            f"has {', '.join(kinds)} operands; {', '.join(tka1.DTYPES)} are taken",
        ),
        (bias is not None, "passes a bias, which TKA-1 does not apply"),
        (module.attention_dropout.p > 0 and module.training, "uses dropout; set attention_dropout=0"),
        (
            torch.is_grad_enabled() and any(tensor.requires_grad for tensor in wanting),
            "wants gradients, which this module does not give yet; use torch.no_grad()",
        ),
    )
    found = next((what for wrong, what in checks if wrong), None)
    if found is not None:
        raise Unsupported(f"TKA-1 as core attention: layer {module.layer_number} {found}.", rule="M-TKA1")
