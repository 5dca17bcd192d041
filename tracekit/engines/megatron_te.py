"""Transformer Engine's attention under Megatron-core, `TEDotProductAttention`: what of it is relied on.

It needs a GPU, so how it is read comes from the sources of both (Transformer Engine 2, Megatron-core 0.19)
and is untested on hardware. The module holds no scale itself: each of the three kernels that it may choose
among holds the same one. It reads a mask for padding alone; causal launches go by mask type and window.
"""

from collections.abc import Mapping
from typing import Any

from tracekit.errors import Unsupported

_KERNELS = ("flash_attention", "fused_attention", "unfused_attention")
_TYPES = {False: ("causal", "causal_bottom_right"), True: ("padding_causal", "causal")}
"""Mask types that are read, by whether the launch is packed; Megatron passes `causal` on as `padding_causal`
of a packed one. Queries are as many as keys, so both corners of `causal` are one."""


def scale_of(module: Any) -> float:
    """Return the factor on q.k.

    Raises:
        Unsupported: `M-HOOK` where the kernels of the module do not hold one scale.
    """
    found = [getattr(getattr(module, name, None), "softmax_scale", None) for name in _KERNELS]
    scales = {scale for scale in found if scale is not None}
    if len(scales) != 1:
        raise Unsupported(
            f"{', '.join(_KERNELS)} of Transformer Engine's module hold the scales {found}, where one was "
            "expected; this version is not what the recorder was made for (docs/engines.md).",
            rule="M-HOOK",
            hook=["softmax_scale"],
        )
    return float(scales.pop())


def window_of(module: Any, given: Mapping[str, Any], packed: bool) -> int | None:
    """Return the tokens that a row reads at most, itself included; None where it reads all before it.

    Args:
        module: the core attention; its `window_size` is the rows before and behind a row.
        given: the arguments of the launch by name.
        packed: whether the launch is `thd`.

    Raises:
        Unsupported: `M-MASK-TYPE`; `M-HOOK`.
    """
    kind = getattr(given.get("attn_mask_type"), "name", str(given.get("attn_mask_type")))
    if kind not in _TYPES[packed]:
        raise Unsupported(
            f"Transformer Engine was called with mask type {kind} for a "
            f"{'packed' if packed else 'padded'} batch; those that are recorded are causal, and "
            "padding_causal for packed ones.",
            rule="M-MASK-TYPE",
            mask_type=kind,
        )
    if not hasattr(module, "window_size"):
        raise Unsupported(
            "Transformer Engine's module has no window_size any more; this version is not what the recorder "
            "was made for (docs/engines.md).",
            rule="M-HOOK",
            hook=["window_size"],
        )
    # What lies behind a row is cut to nothing for a causal launch, whatever the module was made with.
    before = (module.window_size or (-1, 0))[0]
    return None if before < 0 else int(before) + 1
