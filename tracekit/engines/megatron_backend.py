"""TKA-1 as the core attention of a Megatron model, forward and backward.

`on_tka1(spec)` switches a layer spec; everything else of the model stays as it is. TKA-1 gives the same bits
on every machine, but its definition speaks of logical rows, so padding and other documents of a batch place
must not shift them. A core attention gets no tokens: what stands in a slot is read from the mask, or from the
cumulative lengths of a packed launch, which `DotProductAttention` does not take and this module does.
"""

from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from tracekit.engines.megatron_mask import executed_mask, read_selection, slots_of_mask
from tracekit.engines.megatron_points import Kind
from tracekit.engines.megatron_step import Slots, packed_slots
from tracekit.errors import Unsupported
from tracekit.model import Ranges
from tracekit.providers import tka1, tka1_autograd
from tracekit.providers.tka1_autograd import Layout


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
            Unsupported: `M-TKA1` for a dtype that TKA-1 does not take, a bias or dropout;
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
    """Return O, with the axes of the query, and its LSE; both are zero where padding stands.

    O is differentiable. The gradients of a document do not depend on what stands beside it; that of the sink
    is summed over documents in the order of their first slots.
    """
    part = read_selection(mask, window, slots)
    selection: tka1.Ranges | tka1.Lists = (
        tka1.Ranges(part.lo, part.hi) if isinstance(part, Ranges) else tka1.Lists(part.ids, part.offsets)
    )
    layout = Layout(
        rows=slots.row_slots,
        request=slots.request,
        positions=slots.positions,
        held=tuple(slots.slots_of(index) for index in range(slots.requests)),
        selection=selection,
        scale=scale,
    )
    q, k, v = (_flat(tensor, slots) for tensor in (query, key, value))
    out, lse = tka1_autograd.attention(q, k, v, layout, sink)
    return _unflat(out, slots), _unflat(lse, slots)


def _flat(tensor: torch.Tensor, slots: Slots) -> torch.Tensor:
    """`[S, B, ...]` as `[B * S, ...]`; a packed launch is as it stands."""
    return tensor if slots.packed else tensor.transpose(0, 1).flatten(0, 1)


def _unflat(rows: torch.Tensor, slots: Slots) -> torch.Tensor:
    """`[B * S, ...]` as `[S, B, ...]`, or `[t, ...]`."""
    return rows if slots.packed else rows.view(slots.batch, slots.length, *rows.shape[1:]).transpose(0, 1)


def _refuse(module: Any, tensors: tuple[torch.Tensor, ...], bias: torch.Tensor | None) -> None:
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    checks = (
        (len(kinds) > 1, f"has {', '.join(sorted(kinds))} operands; q, k and v must have one dtype"),
        (
            not kinds <= set(tka1.DTYPES),
            f"has {', '.join(kinds)} operands; {', '.join(tka1.DTYPES)} are taken",
        ),
        (bias is not None, "passes a bias, which TKA-1 does not apply"),
        (module.attention_dropout.p > 0 and module.training, "uses dropout; set attention_dropout=0"),
    )
    found = next((what for wrong, what in checks if wrong), None)
    if found is not None:
        raise Unsupported(f"TKA-1 as core attention: layer {module.layer_number} {found}.", rule="M-TKA1")
