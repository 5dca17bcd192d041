"""What both engines are given: one checkpoint, one prompt, and the identity that follows from them."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tools.make_goldens import ids
from tracekit.contract.identity import fingerprint
from tracekit.engines import tiny

MODEL = "tiny-qwen3"
PROMPT = ids(410, 7)
CHUNK = 160
PAGE = 32
NEW_TOKENS = 5
"""The last of them is chosen and never read: 414 tokens are computed, in four leaves of TKA-1.

Up to three leaves merge alike in every tree, and would not show which one ran."""


def weights_file() -> Path:
    """The weights that both engines load."""
    return tiny.prepared(MODEL) / "model.safetensors"


def identity(tokens: list[int] | None = None) -> dict[str, Any]:
    """Return what a side states of itself.

    Args:
        tokens: what it computed; None where it does not know yet, and then it states nothing of them.
    """
    config = json.loads((weights_file().parent / "config.json").read_text())
    stated: dict[str, Any] = {
        "checkpoint_id": hashlib.sha256(weights_file().read_bytes()).hexdigest(),
        "model_version": 0,
        "weight_version": 0,
        "tokenizer_fingerprint": fingerprint("tokens are given as numbers"),
        "padding_side": "none",
        "pre_update_state": fingerprint("no update"),
        "q_heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
        "rotary_dim": config["head_dim"],
        "qk_layernorm": True,
        "batch_size": 1,
    }
    if tokens is not None:
        positions = fingerprint([list(range(len(tokens)))])
        stated |= {
            "token_ids_fingerprint": fingerprint([tokens]),
            "active_mask_fingerprint": fingerprint([[True] * len(tokens)]),
            "position_ids_fingerprint": positions,
            "global_token_positions_fingerprint": positions,
            "kv_seq_lens_fingerprint": fingerprint([len(tokens)]),
        }
    return stated
