"""The mask as it was passed is the truth about what each row read: read it, and pack it to run again."""

from dataclasses import dataclass

import numpy as np
import torch

from tracekit.canonical.padded import PaddedBatch
from tracekit.errors import Unsupported
from tracekit.model import Array, Lists, Ranges
from tracekit.model.launch_plan import Scalar


@dataclass(frozen=True, eq=False)
class MaskReading:
    """What a mask says.

    Args:
        selection: the logical rows that each row read.
        scalars: kind and shape, for a launch plan.
        arrays: the mask itself, one bit an element.
    """

    selection: Ranges | Lists
    scalars: dict[str, Scalar]
    arrays: dict[str, Array]


def read_mask(mask: torch.Tensor | None, batch: PaddedBatch, causal: bool) -> MaskReading:
    """Read a boolean mask, an additive mask of two values, a mask of row ids, or none.

    Args:
        mask: `[B or 1, 1, S, T]`; boolean: True reads; floating: 0 reads, one other value does not;
            integer: the logical row that is read, below 0 for none.
        batch: the launch.
        causal: what the kernel does without a mask: row s reads slots 0 .. s, or every slot.

    Raises:
        Unsupported: `T-MASK` for one mask a head, biases, or another shape.
        InvalidCall: `C-MASK-PADDING`.
    """
    if mask is None:
        visible = batch.causal() if causal else batch.everything()
        return MaskReading(batch.selection(visible), {"mask_kind": "none"}, {})
    sequences = batch.real.shape[0]
    shape = tuple(mask.shape)
    if len(shape) != 4 or shape[0] not in (1, sequences) or shape[1:] != (1, batch.queries, batch.keys):
        raise Unsupported(
            f"the mask of the attention call is {list(shape)}; tracekit reads "
            f"[{sequences}, 1, {batch.queries}, {batch.keys}], one mask for all heads.",
            rule="T-MASK",
            shape=list(shape),
        )
    scalars: dict[str, Scalar] = {"mask_batch": shape[0]}
    if mask.dtype == torch.bool:
        scalars["mask_kind"] = "bool"
        shown = mask.detach().cpu().numpy()
    elif mask.dtype.is_floating_point:
        low = float(mask.min())
        visible_tensor = mask == 0
        if low == 0.0:
            low = float(torch.finfo(mask.dtype).min)
        elif not bool((visible_tensor | (mask == low)).all()):
            raise Unsupported(
                "the additive mask has more than two values, so it is a bias (ALiBi, relative positions); "
                "tracekit records attention without biases.",
                rule="T-MASK",
            )
        scalars |= {
            "mask_kind": "additive",
            "mask_low": low,
            "mask_dtype": str(mask.dtype).removeprefix("torch."),
        }
        shown = visible_tensor.detach().cpu().numpy()
    else:
        scalars["mask_kind"] = "rows"
        shown = (mask >= 0).detach().cpu().numpy()
    visible = np.broadcast_to(shown[:, 0], (sequences, batch.queries, batch.keys))
    if scalars["mask_kind"] == "rows":
        return MaskReading(batch.selection(visible), scalars, {})
    return MaskReading(batch.selection(visible), scalars, {"mask": np.packbits(shown.reshape(-1))})
