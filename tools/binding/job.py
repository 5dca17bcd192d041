"""What both sides compute: an attention of Qwen3-8B's shape, small in depth, from a seed."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tools.binding.settings import Settings
from tracekit.canonical.owners import Owner
from tracekit.contract.identity import fingerprint
from tracekit.model import Array, RequestKey, scale_to_bits
from tracekit.parallel.attention import Shape
from tracekit.providers.split import Sequence, Split
from tracekit.providers.tka1 import LEAF


@dataclass(frozen=True)
class Job:
    """The work, and how it is dealt out.

    Args:
        tokens: length of the sequence.
        prompt: how many of them a rollout prefills; it decodes the rest.
        chunk: tokens of a prefill chunk.
        layers: depth.
        q_heads: query heads.
        kv_heads: key and value heads.
        head_dim: D.
        page: tokens of a KV page.
        tp: tensor-parallel ranks.
        cp: context-parallel ranks.
        sequence: how context-parallel ranks share the tokens.
        seed: of all numbers.
        settings: what happens around and inside of the attention.
    """

    tokens: int = 448
    prompt: int = 432
    chunk: int = 200
    layers: int = 2
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 16
    tp: int = 2
    cp: int = 2
    sequence: Sequence = Sequence.ZIGZAG
    seed: int = 0
    settings: Settings = field(default_factory=Settings)

    @property
    def owners(self) -> list[Owner]:
        """Who owns which tokens and their keys, by context-parallel rank."""
        return Split(context=self.cp, sequence=self.sequence).owners(0, self.tokens, LEAF)

    @property
    def shape(self) -> Shape:
        """What all ranks know of a launch."""
        return Shape(scale_to_bits(self.settings.score_factor(self.head_dim)), self.settings.dtype)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the one request."""
        random = np.random.default_rng(self.seed)
        return [int(token) for token in random.integers(0, 151_936, self.tokens)]

    @property
    def key(self) -> RequestKey:
        """The request."""
        return RequestKey.of_prompt(self.token_ids[: self.prompt])

    def launches(self) -> list[tuple[int, int]]:
        """Return the rows of each launch of a rollout: chunks of the prompt, then one token at a time."""
        starts = [*range(0, self.prompt, self.chunk), *range(self.prompt, self.tokens + 1)]
        return list(pairwise(starts))

    def raw(self, layer: int, name: str) -> Array:
        """Return `q`, `k`, `v` or `d_out` of a layer as projections would, binary32 `[tokens, heads, D]`."""
        order = ("q", "k", "v", "d_out").index(name)
        heads = self.kv_heads if name in ("k", "v") else self.q_heads
        random = np.random.default_rng([self.seed, layer, order])
        return random.standard_normal((self.tokens, heads, self.head_dim), np.float32)

    def identity(self) -> dict[str, object]:
        """Return what a side states of itself; the judge takes what it can from the trace again."""
        positions = [list(range(self.tokens))]
        return {
            "checkpoint_id": fingerprint(["tools.binding", self.seed]),
            "model_version": 0,
            "weight_version": 0,
            "tokenizer_fingerprint": fingerprint("tokens are drawn"),
            "token_ids_fingerprint": fingerprint([self.token_ids]),
            "active_mask_fingerprint": fingerprint([[True] * self.tokens]),
            "position_ids_fingerprint": fingerprint(positions),
            "padding_side": "none",
            "pre_update_state": fingerprint(["no update", self.seed]),
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": 1e6,
            "rope_scaling": None,
            "rotary_dim": self.head_dim,
            "qk_layernorm": True,
            "batch_size": 1,
            "global_token_positions_fingerprint": fingerprint(positions),
            "kv_seq_lens_fingerprint": fingerprint([self.tokens]),
        }
