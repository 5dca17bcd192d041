"""What a side does around and inside of its attention: one setting a thing that can go wrong."""

from dataclasses import dataclass

import numpy as np

from tracekit.model import Array, Bits, DType


@dataclass(frozen=True)
class Settings:
    """The defaults are what is right; a mutation changes one of them on one side, and says nothing.

    Args:
        rope_theta: base of the rotary frequencies.
        rope_positions: `absolute`, `shifted` by one, or `restarted` at 0 with each launch.
        norm_eps: of the RMS norm of each head of queries and keys.
        norm: whether there is one.
        norm_weight: seed of its weight.
        scale: factor of a score, as a multiple of D^-0.5.
        scale_in: `scores`, or `queries` before they are rounded.
        sees: `causal`; `ahead`, all keys of its launch; `masked`, not the first two; `not itself`.
        pages: `in order`, or `swapped`: the first two pages of a table in each other's place.
        cache: `as written`, or `overwritten`: row 3 is another row.
        accumulate: dtype of the partial states.
        downcast: `final_write`, or `per_block`.
        order: `global_block_index`, or `arrival`.
        tree: `aligned_binary`, or `left_fold`.
        write: dtype that O goes through at the final write.
        dtype: of queries, keys, values and O.
    """

    rope_theta: float = 1e6
    rope_positions: str = "absolute"
    norm_eps: float = 1e-6
    norm: bool = True
    norm_weight: int = 1
    scale: float = 1.0
    scale_in: str = "scores"
    sees: str = "causal"
    pages: str = "in order"
    cache: str = "as written"
    accumulate: DType = DType.FLOAT32
    downcast: str = "final_write"
    order: str = "global_block_index"
    tree: str = "aligned_binary"
    write: DType = DType.BFLOAT16
    dtype: DType = DType.BFLOAT16

    def rows(self, raw: Array, positions: Array, launch: int, *, factor: float = 1.0) -> Array:
        """Return queries or keys as the core sees them: normed, rotated, rounded once; bits `[T, H, D]`.

        Args:
            raw: binary32 `[T, H, D]`.
            positions: int64 `[T]`.
            launch: the first position of the launch that the rows are computed in.
            factor: what the rows are multiplied with before they are rounded.
        """
        x = self._normed(raw)
        shift = {"absolute": 0, "shifted": 1, "restarted": -launch}[self.rope_positions]
        return Bits.from_float32(self._rotated(x, positions + shift) * np.float32(factor), self.dtype).data

    def plain(self, raw: Array) -> Array:
        """Return values or dO, rounded once."""
        return Bits.from_float32(raw, self.dtype).data

    def query_factor(self, head_dim: int) -> float:
        """What queries are multiplied with, where the scale is in them."""
        return self.scale * float(head_dim) ** -0.5 if self.scale_in == "queries" else 1.0

    def score_factor(self, head_dim: int) -> float:
        """What scores are multiplied with."""
        return self.scale * float(head_dim) ** -0.5 if self.scale_in == "scores" else 1.0

    def seen(self, positions: Array, stop: int) -> tuple[Array, Array]:
        """Return the first key of each row and the one after its last, in a launch that ends at `stop`."""
        first, end = np.zeros_like(positions), positions + 1
        if self.sees == "ahead":
            end = np.full_like(positions, stop)
        if self.sees == "not itself":
            end = np.maximum(positions, 1)
        if self.sees == "masked":
            first = np.minimum(positions, 2)
        return first, end

    def _normed(self, x: Array) -> Array:
        if not self.norm:
            return x
        weight = 1 + np.random.default_rng(self.norm_weight).standard_normal(x.shape[-1], np.float32) / 8
        square = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
        normed: Array = x / np.sqrt(square + np.float32(self.norm_eps)) * weight
        return normed

    def _rotated(self, x: Array, positions: Array) -> Array:
        """Rotate pairs (i, i + D / 2), as Qwen3 does."""
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.rope_theta ** (-np.arange(half) / half)
        cos, sin = (f(angles)[:, None].astype(np.float32) for f in (np.cos, np.sin))
        low, high = x[..., :half], x[..., half:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
