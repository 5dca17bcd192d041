"""Other people's merge of `(O, LSE)` partials, as an oracle where it is installed; absence is no failure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.providers.tka1 import arithmetic as ar


@dataclass(frozen=True)
class Oracle:
    """What an oracle says.

    Args:
        name: whose merge.
        unavailable: why it says nothing; empty where it does.
        out: binary32 `[T, H, Dv]`.
        lse: binary32 `[T, H]`.
    """

    name: str
    unavailable: str = ""
    out: ar.F32 | None = None
    lse: ar.F32 | None = None


def torch_merge(parts: Sequence[tuple[ar.F32, ar.F32]]) -> Oracle:
    """Merge by torch's own helper for context parallelism (`_SDPAMerger`), in the order given.

    It is private to torch, so it is used only where it is there and merges a case that is known.
    """
    name = "torch.distributed.tensor.experimental"
    try:
        from torch.distributed.tensor.experimental._context_parallel._attention import (
            _SDPAMerger,
        )
    except (ImportError, AttributeError) as error:
        return Oracle(name, f"not in this torch ({error})")
    out, _ = _by_torch(_SDPAMerger, [_state(1, 2), _state(2, 8)])
    if abs(float(out.item()) - 1.8) > 1e-6:
        return Oracle(name, "it merges weights 2 and 8 of values 1 and 2 to another number than 1.8")
    return Oracle(name, "", *_by_torch(_SDPAMerger, parts))


def _state(value: float, weight: float) -> tuple[ar.F32, ar.F32]:
    return np.full((1, 1, 1), value, np.float32), np.log(np.full((1, 1), weight, np.float32))


def _by_torch(merger_type: type, parts: Sequence[tuple[ar.F32, ar.F32]]) -> tuple[ar.F32, ar.F32]:
    """torch merges `[B, H, T, Dv]` and `[B, H, T]`."""
    import torch

    merger = merger_type(convert_to_f32=True, seq_dim=2)
    for out, lse in parts:
        o, l = (torch.from_numpy(np.ascontiguousarray(x.swapaxes(0, 1)[None])) for x in (out, lse))  # noqa: E741
        merger.step(o, l, partial=False)
    o, l = merger.results()  # noqa: E741
    return o[0].numpy().swapaxes(0, 1), l[0].numpy().swapaxes(0, 1)
