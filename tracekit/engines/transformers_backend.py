"""`attn_implementation="tracekit"`: a transformers model runs its attention on TKA-1.

TKA-1 gives the same bits on every machine, but its definition speaks of logical rows, so padding slots and
dropped window rows must not shift them. transformers asks the mask function of an implementation where
padding and cache still are known; this one answers with the logical row of each visible key instead of
True. The mask that the attention function gets is then the selection itself.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from tracekit.engines.torch_bits import borrow, widened
from tracekit.errors import Unsupported
from tracekit.model import Bits, DType, scale_to_bits
from tracekit.providers import tka1
from tracekit.providers.portable import Tka1
from tracekit.providers.torch_tensors import to_torch

NAME = "tracekit"
IDENTITY = Tka1().identity()
"""The version of the definition and nothing else: its bits depend on no library, processor or build."""


def register() -> None:
    """Make the implementation known to transformers; again and again does no harm."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, row_mask)


def row_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return int32 `[B, 1, S, T]`: the logical row of each key that is read, -1 elsewhere.

    The logical row counts the real tokens of the sequence before it; arguments as transformers' `sdpa_mask`.
    """
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    visible = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    slots = kv_offset + kv_length
    real = torch.ones((batch_size, slots), dtype=torch.bool, device=visible.device)
    if attention_mask is not None:
        real[:, : attention_mask.shape[1]] = attention_mask[:, :slots] != 0
    rows = (real.cumsum(1) - 1)[:, kv_offset:].to(torch.int32)
    return torch.where(visible, rows[:, None, None, :], -1)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls; see `attend`."""
    return attend(module, query, key, value, attention_mask, **kwargs)[0], None


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by TKA-1.

    Args:
        module: the attention module; only named in errors.
        query: `[B, H, S, D]`.
        key: `[B, Hkv, T, D]`.
        value: `[B, Hkv, T, Dv]`.
        attention_mask: what `row_mask` gave.
        scaling: the factor on q.k; None is `D ** -0.5`.
        dropout: must be 0.
        s_aux: `[H]` sinks, natural-log logits.
        kwargs: what else the model passes; anything that would change the scores is refused.

    Returns:
        O `[B, S, H, Dv]` in the dtype of the query (+0 in padding rows, which read nothing) and LSE FP32
        `[B, S, H]`.

    Raises:
        Unsupported: `T-TKA1` for a dtype that TKA-1 does not take, a bias, dropout, a gradient, or a foreign
            mask.
    """
    _refuse(module, (query, key, value), attention_mask, dropout, kwargs)
    assert attention_mask is not None
    batch, _, length, width = query.shape
    rows = np.broadcast_to(attention_mask[:, 0].cpu().numpy(), (batch, length, key.shape[2]))
    borrowed = borrow(query, "query")
    q = borrowed.data.transpose(0, 2, 1, 3).reshape(batch * length, -1, width)
    answer = tka1.attention(
        tka1.Inputs(
            q=np.ascontiguousarray(q),
            request=np.repeat(np.arange(batch, dtype=np.int32), length),
            families=(_family(rows, borrow(key, "keys").data, borrow(value, "values").data),),
            sink=None if s_aux is None else widened(s_aux, "sinks").data,
            scale_bits=scale_to_bits(width**-0.5 if scaling is None else scaling),
            dtype=borrowed.dtype,
        )
    )
    out = to_torch(Bits(answer.out, borrowed.dtype)).reshape(batch, length, query.shape[1], -1)
    lse = to_torch(Bits(answer.lse, DType.FLOAT32)).reshape(batch, length, -1)
    return out.to(query.device), lse


def _family(rows: npt.NDArray[Any], k: npt.NDArray[Any], v: npt.NDArray[Any]) -> tka1.FamilyInput:
    """Return KV in its logical place, and what `rows`, `[B, S, T]` (-1 for none), reads of it."""
    keys, values, first = [], [], []
    for b in range(rows.shape[0]):
        # The row that a key slot holds is the same for every query that reads it; one that none reads is
        # not given to the kernel.
        held = rows[b].max(0)
        slots = np.flatnonzero(held >= 0)
        start = int(held[slots].min()) if slots.size else 0
        count = int(held[slots].max()) - start + 1 if slots.size else 0
        keys.append(_placed(k[b], slots, held[slots] - start, count))
        values.append(_placed(v[b], slots, held[slots] - start, count))
        first.append(start)
    flat = rows.reshape(-1, rows.shape[2])
    return tka1.FamilyInput(tuple(keys), tuple(values), tuple(first), _selection(flat))


def _placed(
    cache: npt.NDArray[Any], slots: npt.NDArray[Any], rows: npt.NDArray[Any], count: int
) -> npt.NDArray[Any]:
    """Return cache slots `[Hkv, T, D]` as rows `[count, Hkv, D]`; rows that nobody reads are zero."""
    placed = np.zeros((count, cache.shape[0], cache.shape[2]), cache.dtype)
    placed[rows] = cache[:, slots].transpose(1, 0, 2)
    return placed


def _selection(rows: npt.NDArray[Any]) -> tka1.Ranges | tka1.Lists:
    """Return what each query reads out of `[B * S, T]` logical rows, -1 for none."""
    seen = rows >= 0
    counts = seen.sum(1, dtype=np.int64)
    hi = rows.max(1).astype(np.int64) + 1
    lo = np.where(seen, rows, np.iinfo(np.int32).max).min(1).astype(np.int64)
    lo = np.where(counts > 0, lo, 0)
    if (hi - lo == counts).all():
        return tka1.Ranges(lo, hi)
    return tka1.Lists(rows[seen].astype(np.int64), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def _refuse(module: Any, tensors: tuple[torch.Tensor, ...], mask: Any, dropout: float, kwargs: Any) -> None:
    bias = next(
        (n for n in ("softcap", "position_bias", "indices", "head_mask") if kwargs.get(n) is not None), None
    )
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    foreign = not isinstance(mask, torch.Tensor) or mask.dtype != torch.int32
    checks = (
        (len(kinds) > 1, f"has {', '.join(sorted(kinds))} operands; q, k and v must have one dtype"),
        (
            not kinds <= set(tka1.DTYPES),
            f"has {', '.join(kinds)} operands; {', '.join(tka1.DTYPES)} are taken",
        ),
        (bias is not None, f"passes {bias}, which TKA-1 does not apply"),
        (
            getattr(module, "compressor", None) is not None,
            "reads compressed rows beside its window; run it on eager, and replay the trace on tka1",
        ),
        (dropout != 0.0, "uses dropout; call model.eval()"),
        (
            torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
            "wants gradients, which this implementation does not give yet; use torch.no_grad()",
        ),
        (foreign, "got a mask made elsewhere; pass the 2-D attention_mask and let the model make it"),
    )
    found = next((what for wrong, what in checks if wrong), None)
    if found is not None:
        raise Unsupported(
            f"attn_implementation='tracekit': {type(module).__name__} {found}.",
            rule="T-TKA1",
            module=type(module).__name__,
        )
