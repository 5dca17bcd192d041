"""What both sides must agree on bit for bit before a number computed from the pair means anything (B1)."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tracekit.contract.codes import Issue

FIELDS = (
    "checkpoint_id",
    "model_version",
    "weight_version",
    "tokenizer_fingerprint",
    "token_ids_fingerprint",
    "active_mask_fingerprint",
    "position_ids_fingerprint",
    "padding_side",
    "pre_update_state",
    "q_heads",
    "kv_heads",
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "rotary_dim",
    "qk_layernorm",
    "batch_size",
    "global_token_positions_fingerprint",
    "kv_seq_lens_fingerprint",
)
"""The identity, in the names of RL-Kernel's `IDENTITY_FIELDS`."""

NULLABLE = frozenset({"rope_scaling"})
"""Fields whose null is a value: a model without RoPE scaling says so, and is not silent about it."""


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of a value as canonical JSON: sorted keys, no spaces, finite numbers only."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def identity_fingerprint(identity: Mapping[str, Any]) -> str:
    """Return the fingerprint of the fields of an identity; what else a caller keeps in it counts nothing."""
    said = {name: identity.get(name) for name in FIELDS}
    return fingerprint(
        {name: value if _text(value) is not None else repr(value) for name, value in said.items()}
    )


def check_identity(rollout: Mapping[str, Any], training: Mapping[str, Any]) -> Iterator[Issue]:
    """Yield an issue for each field that a side does not state, and for each that differs."""
    for side, identity in (("rollout", rollout), ("training", training)):
        for name in FIELDS:
            if identity.get(name, "") == "" or (identity[name] is None and name not in NULLABLE):
                yield Issue(
                    "IDENTITY_MISSING", f"{side}.{name}", f"the {side} side does not state its {name}."
                )
            elif _text(identity[name]) is None:
                yield Issue(
                    "IDENTITY_MISSING",
                    f"{side}.{name}",
                    f"{name} of the {side} side is {identity[name]!r}, which is no value of JSON.",
                )
    for name in FIELDS:
        theirs, ours = rollout.get(name), training.get(name)
        if not same(theirs, ours):
            both = (value if _text(value) is not None else repr(value) for value in (theirs, ours))
            yield Issue("IDENTITY_MISMATCH", name, f"{name} differs: nothing can be compared.", *both)


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are the same: 1, 1.0 and true are three values here, and NaN is none."""
    text = _text(left)
    return text is not None and text == _text(right)


def _text(value: Any) -> str | None:
    """A value as JSON; None where it is none."""
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
