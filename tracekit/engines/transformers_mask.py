"""The mask as it was passed is the truth about what each row read: read it, and pack it to run again."""

from dataclasses import dataclass

import numpy as np
import torch

from tracekit.canonical.padded import as_selection
from tracekit.engines.transformers_families import Slots
from tracekit.errors import Unsupported
from tracekit.model import Array, KVFamily, Lists, Ranges, Selection
from tracekit.model.launch_plan import Scalar


@dataclass(frozen=True, eq=False)
class MaskReading:
    """What a mask says.

    Args:
        selection: the logical rows that each row read, family by family in the order of the slots.
        scalars: kind and shape, for a launch plan.
        arrays: the mask itself, one bit an element.
    """

    selection: Selection
    scalars: dict[str, Scalar]
    arrays: dict[str, Array]


def read_mask(mask: torch.Tensor | None, slots: Slots, causal: bool) -> MaskReading:
    """Read a boolean mask, an additive mask of two values, a mask of row ids, or none.

    Args:
        mask: `[B or 1, 1, S, T]`; boolean: True reads; floating: 0 reads, one other value does not (which
            may be another one over compressed rows); integer: the logical row that is read, below 0 for
            none.
        slots: the launch.
        causal: what the kernel does without a mask: row s reads slots 0 .. s, or every slot.

    Raises:
        Unsupported: `T-MASK` for one mask a head, biases, or another shape.
        InvalidCall: `C-MASK-PADDING`.
    """
    batch = slots.batch
    if mask is None:
        visible = batch.causal() if causal else slots.everything()
        return MaskReading(_selection(visible, slots), {"mask_kind": "none"}, {})
    sequences = batch.real.shape[0]
    shape = tuple(mask.shape)
    if len(shape) != 4 or shape[0] not in (1, sequences) or shape[1:] != (1, batch.queries, slots.keys):
        raise Unsupported(
            f"the mask of the attention call is {list(shape)}; tracekit reads "
            f"[{sequences}, 1, {batch.queries}, {slots.keys}], one mask for all heads.",
            rule="T-MASK",
            shape=list(shape),
        )
    scalars: dict[str, Scalar] = {"mask_batch": shape[0]}
    if mask.dtype == torch.bool:
        scalars["mask_kind"] = "bool"
        shown = mask.detach().cpu().numpy()
    elif mask.dtype.is_floating_point:
        scalars |= {"mask_kind": "additive", "mask_dtype": str(mask.dtype).removeprefix("torch.")}
        scalars["mask_low"] = _low(mask[..., : batch.keys])
        if slots.compressed:
            scalars["mask_low_compressed"] = _low(mask[..., batch.keys :])
        shown = (mask == 0).detach().cpu().numpy()
    else:
        scalars["mask_kind"] = "rows"
        shown = (mask >= 0).detach().cpu().numpy()
    visible = np.broadcast_to(shown[:, 0], (sequences, batch.queries, slots.keys))
    arrays = {} if scalars["mask_kind"] == "rows" else {"mask": np.packbits(shown.reshape(-1))}
    return MaskReading(_selection(visible, slots), scalars, arrays)


def _low(mask: torch.Tensor) -> float:
    """The value that hides a key; of a mask that hides none, the one that would.

    Raises:
        Unsupported: `T-MASK` when there is more than one.
    """
    low = float(mask.min())
    if low == 0.0:
        return float(torch.finfo(mask.dtype).min)
    if not bool(((mask == 0) | (mask == low)).all()):
        raise Unsupported(
            "the additive mask has more than two values, so it is a bias (ALiBi, relative positions); "
            "tracekit records attention without biases.",
            rule="T-MASK",
        )
    return low


def _selection(visible: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], slots: Slots) -> Selection:
    batch = slots.batch
    families: dict[KVFamily, Ranges | Lists] = {slots.family: batch.selection(visible[..., : batch.keys])}
    if slots.compressed_family is not None:
        b, s = np.divmod(batch.row_slots, batch.queries)
        seen = visible[b, s, batch.keys :]
        ids = np.broadcast_to(np.arange(slots.compressed, dtype=np.int64), seen.shape)
        families[slots.compressed_family] = as_selection(seen, ids)
    return Selection(families)
