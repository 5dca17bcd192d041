"""What each row of a Megatron launch read: the mask as it was executed, in logical rows.

`DotProductAttention` does not look at the mask type that it is called with: a mask that it gets hides keys
whatever the type, and without one only a module of type `causal` makes one itself. It hides a key by giving
it the score -10000, so a row that may read nothing reads everything: such a row is refused.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tracekit.canonical.padded import as_selection
from tracekit.engines import megatron_te
from tracekit.engines.megatron_points import Kind
from tracekit.engines.megatron_step import Slots
from tracekit.errors import Unsupported
from tracekit.model import Lists, Ranges

Visible = npt.NDArray[np.bool_]


def executed_mask(
    kind: Kind, module: Any, given: Any, packed: bool
) -> tuple[torch.Tensor | None, int | None]:
    """Return the mask that a core attention goes by, None where it makes a causal one, and its window.

    Args:
        kind: of core attention.
        module: the core attention.
        given: its arguments by name.
        packed: whether the launch is `thd`.

    Raises:
        Unsupported: `M-MASK` for a mask that is not understood; `M-MASK-TYPE` for a mask type that says
            nothing here.
    """
    if kind is Kind.TRANSFORMER_ENGINE:
        return None, megatron_te.window_of(module, given, packed)
    mask, window = given["attention_mask"], _window(module)
    if packed and mask is not None:
        raise Unsupported(
            "a packed launch has a mask beside its cu_seqlens; pass one of them.", rule="M-MASK"
        )
    if mask is None and window is None and not packed and module.attn_mask_type.name != "causal":
        raise Unsupported(
            f"the module has mask type {module.attn_mask_type.name} and got no mask, so Megatron hides "
            "nothing; pass the mask, or build the layers with AttnMaskType.causal.",
            rule="M-MASK-TYPE",
            mask_type=module.attn_mask_type.name,
        )
    # A layer with a window makes its own mask, whatever it is given.
    return (mask if window is None else None), window


def read_selection(mask: torch.Tensor | None, window: int | None, slots: Slots) -> Ranges | Lists:
    """Return the logical rows that each row read.

    Args:
        mask: bool `[B or 1, 1, S, S]`, True where a key is hidden; None for a causal one.
        window: tokens that a row reads at most, where there is no mask.
        slots: what stands where.

    Raises:
        Unsupported: `M-MASK`; `M-MASK-ACROSS` for a row that reads padding or another request;
            `M-MASK-EMPTY` for one that reads nothing.
    """
    if mask is None and (slots.packed or _right_padded(slots)):
        # Every row reads its own request up to itself; no matrix of all pairs is needed to say so.
        place = slots.positions
        lo = np.zeros_like(place) if window is None else np.maximum(place - window + 1, 0)
        return Ranges(lo, place + 1)
    visible = visibility(mask, window, slots.batch, slots.length)
    b, s = np.divmod(slots.row_slots, slots.length)
    seen = np.broadcast_to(visible, (slots.batch, *visible.shape[1:]))[b, s]
    across = seen & (slots.segment[b] != slots.segment[b, s][:, None])
    for wrong, rule, what in (
        (across.any(1), "M-MASK-ACROSS", "reads padding or another request of its batch place"),
        (~seen.any(1), "M-MASK-EMPTY", "may read no key, and Megatron then lets it read every key"),
    ):
        if wrong.any():
            t = int(np.argmax(wrong))
            raise Unsupported(
                f"batch place {int(b[t])}, slot {int(s[t])}: the mask says that the row {what}; pass the "
                "mask that says which tokens are padding, or where documents end (reset_attention_mask).",
                rule=rule,
            )
    return as_selection(seen, slots.place[b])


def visibility(mask: torch.Tensor | None, window: int | None, batch: int, length: int) -> Visible:
    """Which key slots each query slot reads, bool `[B or 1, S, S]`; arguments as `read_selection`.

    Raises:
        Unsupported: `M-MASK`.
    """
    if mask is None:
        visible = np.tri(length, dtype=np.bool_)
        return (visible if window is None else visible & ~np.tri(length, k=-window, dtype=np.bool_))[None]
    shape = tuple(mask.shape)
    if mask.dtype != torch.bool or shape not in ((1, 1, length, length), (batch, 1, length, length)):
        raise Unsupported(
            f"the attention mask is {str(mask.dtype).removeprefix('torch.')} {list(shape)}; tracekit reads "
            f"bool [{batch} or 1, 1, {length}, {length}], True where a key is hidden.",
            rule="M-MASK",
            shape=list(shape),
        )
    shown: Visible = ~mask[:, 0].detach().cpu().numpy()
    return shown


def slots_of_mask(mask: torch.Tensor | None, window: int | None, batch: int, length: int) -> Slots:
    """Return what stands in the slots of a launch, as far as its mask says it.

    A key that no query reads is padding. A document ends where no later query reads what was before.

    Raises:
        Unsupported: `M-MASK`.
    """
    visible = visibility(mask, window, batch, length)
    segment = np.full((batch, length), -1, np.int32)
    place = np.zeros((batch, length), np.int64)
    count = 0
    for b in range(batch):
        seen = visible[b if len(visible) > 1 else 0]
        real = np.flatnonzero(seen.any(0))
        reads = seen[real][:, real]
        lowest = np.where(reads.any(1), reads.argmax(1), real.size)
        # The earliest key that this query or a later one reads; at a document's first slot it is the slot.
        later = np.minimum.accumulate(lowest[::-1])[::-1] if real.size else lowest
        starts = np.flatnonzero(later >= np.arange(real.size))
        index = np.searchsorted(starts, np.arange(real.size), side="right") - 1
        segment[b, real] = count + index
        place[b, real] = np.arange(real.size) - starts[index]
        count += starts.size
    return Slots(segment, place, False)


def _window(module: Any) -> int | None:
    """The tokens that a row reads at most, itself included, where the layer has a sliding window."""
    size = getattr(getattr(module, "scale_mask_softmax", None), "window_size", None)
    if size is None:
        return None
    if size[1] != 0 or size[0] < 0:
        raise Unsupported(f"a window of {size} looks ahead or has no end.", rule="M-MASK", window=list(size))
    return int(size[0]) + 1


def _right_padded(slots: Slots) -> bool:
    """Whether each batch place holds one request from its first slot on, and padding only behind it."""
    real = slots.segment >= 0
    one = bool((np.where(real, slots.place, 0) == np.where(real, np.arange(real.shape[1]), 0)).all())
    return one and bool((np.diff(real.astype(np.int8), axis=1) <= 0).all())
