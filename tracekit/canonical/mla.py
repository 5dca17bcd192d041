"""Multi-head latent attention: one cached row is key and, in its first part, value.

An absorbed kernel reads rows `[latent | rope]` of `kv_lora + rope` elements: the key is the whole row, the
value its first `kv_lora` elements (vLLM's MLA cache, Megatron's `DSAttention`, FlashMLA with `d_v = 512`). In
the words of the model that is one KV head, D = kv_lora + rope, Dv = kv_lora: `KVRows.values` is given, equal
to the first Dv elements of the keys bit for bit. `values=None` stays what it is: keys and values of one
width. The values are a view of the keys here, so nothing is copied before a recorder takes them.
"""

import numpy as np

from tracekit.canonical.refuse import need_patterns, refuse
from tracekit.model import Array


def latent_rows(latents: Array, kv_lora: int) -> tuple[Array, Array]:
    """Return keys `[N, 1, D]` and values `[N, 1, kv_lora]` of cached rows, views.

    Args:
        latents: `[N, D]` or `[N, 1, D]`, unsigned integers.
        kv_lora: Dv, the elements before the rotary part.

    Raises:
        InvalidCall: `C-BITS`; `C-MLA-SHAPE` when the rows are not so.
    """
    need_patterns(latents, "latents")
    keys = latents[:, None] if latents.ndim == 2 else latents
    if keys.ndim != 3 or keys.shape[1] != 1 or not 0 < kv_lora <= keys.shape[2]:
        refuse(
            "C-MLA-SHAPE",
            f"latents are [N, 1, D] with D at least kv_lora = {kv_lora}, not {list(latents.shape)}.",
            shape=list(latents.shape),
            kv_lora=kv_lora,
        )
    return keys, keys[..., :kv_lora]


def join_latent(latent: Array, rope: Array) -> Array:
    """Return rows `[N, kv_lora + rope]` of parts that an engine hands over apart (`k_c_normed`, `k_pe`).

    Args:
        latent: `[N, kv_lora]` or `[N, 1, kv_lora]`, after its norm.
        rope: `[N, r]` or `[N, 1, r]`, after rotation.

    Raises:
        InvalidCall: `C-BITS`; `C-MLA-SHAPE` when the parts do not belong together.
    """
    parts = [need_patterns(part, name) for part, name in ((latent, "latent"), (rope, "rope"))]
    flat = [part[:, 0] if part.ndim == 3 and part.shape[1] == 1 else part for part in parts]
    if any(part.ndim != 2 for part in flat) or len(flat[0]) != len(flat[1]) or latent.dtype != rope.dtype:
        refuse(
            "C-MLA-SHAPE",
            f"latent {latent.dtype} {list(latent.shape)} and rope {rope.dtype} {list(rope.shape)} "
            "are no parts of the same rows.",
        )
    return np.concatenate(flat, axis=1)


def split_latent(keys: Array, values: Array) -> tuple[Array, Array]:
    """Return latent `[N, Dv]` and rope `[N, D - Dv]`, views of the keys; the inverse of `join_latent`.

    Args:
        keys: `[N, 1, D]`.
        values: `[N, 1, Dv]`.

    Raises:
        InvalidCall: `C-MLA-SHAPE` for more than one head; `C-MLA-PREFIX` when the values are not the first
            part of the keys: such rows come from no latent cache, and no latent kernel can read them.
    """
    if keys.ndim != 3 or values.ndim != 3 or keys.shape[1] != 1 or values.shape[:2] != keys.shape[:2]:
        refuse("C-MLA-SHAPE", f"keys {list(keys.shape)} and values {list(values.shape)} are one KV head.")
    width = values.shape[2]
    if values.dtype != keys.dtype or not np.array_equal(keys[..., :width], values):
        refuse(
            "C-MLA-PREFIX", f"values are not the first {width} of {keys.shape[2]} key elements.", width=width
        )
    return keys[:, 0, :width], keys[:, 0, width:]
