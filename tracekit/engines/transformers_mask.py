"""The mask as it was passed is the truth about what each row read; this reads it, and packs it for a re-launch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tracekit.canonical.padded import PaddedBatch
from tracekit.engines.torch_bits import torch_dtype
from tracekit.errors import Unsupported
from tracekit.model import Array, DType, LaunchPlan, Lists, Ranges
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
    return MaskReading(batch.selection(visible), scalars, {"mask": np.packbits(shown.reshape(-1))})


def rebuild_mask(plan: LaunchPlan) -> torch.Tensor | None:
    """Return the mask that a launch plan holds, as it was passed."""
    kind = plan.scalars["mask_kind"]
    if kind == "none":
        return None
    shape = [_whole(plan, name) for name in ("mask_batch", "query_length", "key_length")]
    count = int(np.prod(shape))
    shown = np.unpackbits(np.asarray(plan.arrays["mask"], np.uint8), count=count).astype(np.bool_)
    return mask_of_kind(shown.reshape(shape), plan.scalars)


def mask_of_kind(visible: npt.NDArray[np.bool_], scalars: Any) -> torch.Tensor:
    """Return a mask `[B, 1, S, T]` of the kind that a launch used.

    Args:
        visible: `[B, S, T]`.
        scalars: `mask_kind`, and for an additive mask `mask_low` and `mask_dtype`.
    """
    shown = torch.from_numpy(np.ascontiguousarray(visible))[:, None]
    if scalars["mask_kind"] != "additive":
        return shown
    dtype = torch_dtype(DType(scalars["mask_dtype"]))
    return torch.where(shown, torch.zeros((), dtype=dtype), torch.tensor(scalars["mask_low"], dtype=dtype))


def _whole(plan: LaunchPlan, name: str) -> int:
    value = plan.scalars[name]
    assert isinstance(value, int)
    return value
