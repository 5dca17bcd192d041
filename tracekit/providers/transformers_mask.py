"""Masks of transformers launches, rebuilt: as a launch plan holds them, or from what each row reads."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from tracekit.model import DType, LaunchPlan
from tracekit.model.launch_plan import Scalar
from tracekit.providers.torch_tensors import torch_dtype
from tracekit.providers.transformers_plan import whole


def rebuild_mask(plan: LaunchPlan) -> torch.Tensor | None:
    """Return the mask that a launch plan holds, as it was passed."""
    if plan.scalars["mask_kind"] == "none":
        return None
    shape = [whole(plan, name) for name in ("mask_batch", "query_length", "key_length")]
    packed = np.asarray(plan.arrays["mask"], np.uint8)
    shown = np.unpackbits(packed, count=int(np.prod(shape))).astype(np.bool_)
    return mask_of_kind(shown.reshape(shape), plan.scalars)


def mask_of_kind(visible: npt.NDArray[np.bool_], scalars: Mapping[str, Scalar]) -> torch.Tensor:
    """Return a mask `[B, 1, S, T]` of the kind that a launch used.

    Args:
        visible: `[B, S, T]`.
        scalars: `mask_kind`, and for an additive mask `mask_low` and `mask_dtype`; with two families also
            `compressed_length` and `mask_low_compressed`, the same of the last slots.
    """
    shown = torch.from_numpy(np.ascontiguousarray(visible))[:, None]
    if scalars["mask_kind"] != "additive":
        return shown
    dtype = torch_dtype(DType(str(scalars["mask_dtype"])))
    hidden = torch.full(shown.shape[-1:], _number(scalars["mask_low"]), dtype=dtype)
    compressed = scalars.get("compressed_length")
    if isinstance(compressed, int) and compressed:
        hidden[-compressed:] = _number(scalars["mask_low_compressed"])
    return torch.where(shown, torch.zeros((), dtype=dtype), hidden)


def _number(value: Scalar) -> float:
    assert isinstance(value, float)
    return value
