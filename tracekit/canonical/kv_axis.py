"""Split a packed K/V array, or refuse: with two local KV heads more than one axis can be the K/V axis."""

from tracekit.errors import ConventionAmbiguous
from tracekit.model import Array


def split_kv(packed: Array, num_kv_heads: int, kv_axis: int | None = None) -> tuple[Array, Array]:
    """Return keys and values `[N, Hkv, D]` of one packed array.

    Args:
        packed: `[2, N, Hkv, D]`, `[N, 2, Hkv, D]` or `[N, Hkv, 2, D]`.
        num_kv_heads: Hkv of this rank.
        kv_axis: the axis of length 2 that tells K from V; None takes the only one that is possible.

    Raises:
        ConventionAmbiguous: `C-KV-AXIS` when several axes are possible, or none is.
    """
    candidates = [axis for axis in range(max(packed.ndim - 1, 0)) if _fits(packed.shape, axis, num_kv_heads)]
    if packed.ndim != 4 or not candidates or (kv_axis is not None and kv_axis not in candidates):
        raise ConventionAmbiguous(
            f"packed KV {list(packed.shape)} with {num_kv_heads} KV heads has no K/V axis "
            f"{'' if kv_axis is None else f'{kv_axis} '}of length 2 beside [N, Hkv, D]; "
            "pass keys= and values= apart.",
            rule="C-KV-AXIS",
            shape=list(packed.shape),
            axes=candidates,
        )
    if kv_axis is None and len(candidates) > 1:
        raise ConventionAmbiguous(
            f"packed KV {list(packed.shape)} with {num_kv_heads} KV heads: axes "
            f"{' and '.join(map(str, candidates))} could each be the K/V axis; say which with kv_axis=, "
            "or pass keys= and values= apart.",
            rule="C-KV-AXIS",
            shape=list(packed.shape),
            axes=candidates,
        )
    axis = candidates[0] if kv_axis is None else kv_axis
    return packed.take(0, axis), packed.take(1, axis)


def _fits(shape: tuple[int, ...], axis: int, num_kv_heads: int) -> bool:
    """Whether K/V can lie on `axis`: it has length 2, and the rest reads as [N, Hkv, D]."""
    rest = shape[:axis] + shape[axis + 1 :]
    return shape[axis] == 2 and len(rest) == 3 and rest[1] == num_kv_heads
