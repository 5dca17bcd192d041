"""Which request of one trace is which request of another: by content, never by engine id or order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.model import Request, RequestKey

RELATED = 0.5
"""The common prefix must hold this part of the shorter prompt: a shared first token relates nobody."""


@dataclass(frozen=True)
class Pair:
    """Two requests that begin with the same tokens.

    Args:
        base: key in the base trace.
        target: key in the target trace.
        tokens: length of the common token prefix; only rows before it are comparable.
    """

    base: RequestKey
    target: RequestKey
    tokens: int


def common_prefix(base: Request, target: Request) -> int:
    """Return how many leading tokens two requests share."""
    count = min(base.token_ids.size, target.token_ids.size)
    differs = np.flatnonzero(base.token_ids[:count] != target.token_ids[:count])
    return int(differs[0]) if differs.size else count


def related(base: Request, target: Request) -> int:
    """Return the length of the common prefix, or 0 where it is too short to call the requests one."""
    tokens = common_prefix(base, target)
    return tokens if tokens >= RELATED * max(1, min(base.prompt_length, target.prompt_length)) else 0


def align(base: Sequence[Request], target: Sequence[Request]) -> list[Pair]:
    """Pair requests one to one, the longest common token prefix first.

    Ties go to equal request keys, then to the order of the base trace. A request that shares less than half
    of the shorter prompt stays alone. Rows behind the common prefix saw other tokens and are no pair.
    """
    candidates = [
        Pair(ours.key, theirs.key, tokens)
        for ours in base
        for theirs in target
        if (tokens := related(ours, theirs))
    ]
    # sorted() is stable: among equals the order of the base trace stays
    candidates.sort(key=lambda pair: (-pair.tokens, pair.base != pair.target))
    pairs: list[Pair] = []
    for pair in candidates:
        if all(pair.base != taken.base and pair.target != taken.target for taken in pairs):
            pairs.append(pair)
    return pairs
