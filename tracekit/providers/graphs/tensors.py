"""What static launches of torch operators share: input tensors that are written in place, and an output."""

from collections.abc import Mapping

import numpy as np
import torch

from tracekit.model import Bits, DType
from tracekit.providers.base import Tensors
from tracekit.providers.placement import Fill
from tracekit.providers.torch_tensors import from_torch


class TensorLaunch:
    """Inputs by name, and O `[slots, H, Dv]`; a subclass adds `load`, `enqueue` and `executed`.

    Args:
        inputs: tensors with room for each call.
        out: O.
        dtype: of O.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor], out: torch.Tensor, dtype: DType) -> None:
        self.inputs, self.out, self.dtype = dict(inputs), out, dtype
        self.slots = np.arange(len(out))
        self._loaded: dict[str, torch.Tensor] = {}

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write values into the front of the inputs of their names; what lies behind them becomes zero."""
        for name, value in values.items():
            room = self.inputs[name]
            room.zero_()
            room[tuple(slice(size) for size in value.shape)].copy_(value)
        self._loaded = {name: tensor.clone() for name, tensor in self.inputs.items()}

    def poison(self, fill: Fill) -> None:
        """Fill O."""
        words = torch.int32 if self.dtype is DType.FLOAT32 else torch.int16
        signed = np.array(fill.pattern(self.dtype), self.dtype.container).view(f"i{words.itemsize}")
        self.out.view(words).fill_(int(signed))

    def read(self) -> Tensors:
        """Return a copy of O, by the slots of the rows of the call that was loaded last; no LSE."""
        return Tensors(Bits(from_torch(self.out, "O")[0][self.slots], self.dtype), None)

    def changed(self) -> str | None:
        """Return the name of an input that is not as it was written, or None."""
        return next((name for name, was in self._loaded.items() if not _same(self.inputs[name], was)), None)


def room(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return zeros with room for each of some tensors of one dtype and rank."""
    shape = np.max([tensor.shape for tensor in tensors], axis=0)
    return torch.zeros(tuple(int(size) for size in shape), dtype=tensors[0].dtype)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes: a NaN equals itself."""
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
