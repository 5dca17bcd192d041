"""One forward of a transformers model: which tokens of which sequences it is about."""

import inspect
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tracekit.canonical.padded import PaddedBatch
from tracekit.errors import Unsupported
from tracekit.model import Array
from tracekit.model.rows import UNKNOWN_TOKEN
from tracekit.recorder.observation import Handle
from tracekit.recorder.session import Session

CACHE_LAYERS = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DynamicIndexedLayer",
    "DeepseekV4CSACache",
    "DeepseekV4HCACache",
}
"""Cache layers whose rows tracekit can place: row 0 of `[B, H, T, D]` is slot `past + S - T`, where T does
not count the compressed rows of DeepSeek-V4."""


@dataclass
class Forward:
    """One forward.

    Args:
        tokens: int64 `[B, S]`, -1 where embeddings were passed.
        real: bool `[B, past + S]`, False for padding.
        past: token slots before this forward.
        handles: the request of each batch place.
        cache: as passed; None where the model makes one, or uses none.
        implementation: the attention that the model is set to.
        placed: whether the rows that its cache will hold are known.
    """

    tokens: npt.NDArray[np.int64]
    real: npt.NDArray[np.bool_]
    past: int
    handles: list[Handle]
    cache: Any = None
    implementation: str = ""
    placed: bool = False
    batches: dict[int, PaddedBatch] = field(default_factory=dict)
    derived: dict[Any, Any] = field(default_factory=dict)
    """What the layers of one forward share: the same mask object is read once."""

    @property
    def queries(self) -> int:
        """S."""
        return int(self.tokens.shape[1])

    def batch(self, keys: int) -> PaddedBatch:
        """The padded batch with T key slots held."""
        if keys not in self.batches:
            self.batches[keys] = PaddedBatch(self.real, self.queries, keys)
        return self.batches[keys]


class Sequences:
    """Which request each place of a batch belongs to, over the life of a cache.

    A batch place is no identity, but a cache object is one for as long as it lives: the forward that fills
    an empty cache opens requests, and those that find rows in it continue them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._by_cache: weakref.WeakKeyDictionary[Any, list[Handle]] = weakref.WeakKeyDictionary()

    def bind(self, cache: Any, handles: list[Handle]) -> None:
        """Remember the requests of a cache, which the model may have made itself."""
        if cache is not None and cache not in self._by_cache:
            self._by_cache[cache] = handles

    def of(self, cache: Any, past: int, batch: int) -> list[Handle]:
        """Return the requests of a batch, new ones where the cache is empty.

        Raises:
            Unsupported: `T-CACHE` when the cache was filled before the recording began.
        """
        if past == 0:
            handles = [self._session.requests.open() for _ in range(batch)]
            if cache is not None:
                self._by_cache[cache] = handles
            return handles
        known = self._by_cache.get(cache)
        if known is None or len(known) != batch:
            raise Unsupported(
                f"the cache holds {past} tokens that this recording has not seen as {batch} sequences; "
                "begin the recording before the prefill, and do not resize the batch.",
                rule="T-CACHE",
                past=past,
            )
        return known


def read_forward(signature: inspect.Signature, args: Any, kwargs: Any, sequences: Sequences) -> Forward:
    """Read the arguments of the model's forward.

    Raises:
        Unsupported: `T-CACHE`, `T-MASK`, `T-PACKED`, `T-REWIND`.
    """
    given = signature.bind_partial(*args, **kwargs).arguments
    given = {**given.pop("kwargs", {}), **given}
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    if ids is None and embeds is None:
        raise Unsupported("the forward has neither input_ids nor inputs_embeds.", rule="T-INPUT")
    shape: tuple[int, ...] = tuple(given["inputs_embeds" if ids is None else "input_ids"].shape[:2])
    tokens = np.full(shape, UNKNOWN_TOKEN, np.int64) if ids is None else ids.detach().cpu().numpy()
    cache = cache_of(given)
    past = 0 if cache is None else int(cache.get_seq_length())
    real = _real(given.get("attention_mask"), shape, past)
    _refuse_packed(given.get("position_ids"), real[:, past:])
    handles = sequences.of(cache, past, shape[0])
    return Forward(tokens.astype(np.int64), real, past, handles, cache)


def cache_of(kwargs: Any) -> Any:
    """Return the cache argument: `cache` from transformers 5.24 on, `past_key_values` before."""
    cache = kwargs.get("cache")
    return cache if cache is not None else kwargs.get("past_key_values")


def _real(mask: Any, shape: tuple[int, ...], past: int) -> npt.NDArray[np.bool_]:
    slots = past + shape[1]
    if mask is None:
        return np.ones((shape[0], slots), np.bool_)
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or tuple(mask.shape) != (shape[0], slots):
        found = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise Unsupported(
            f"attention_mask is {found}; only the 2-D mask [{shape[0]}, {slots}] over past and new tokens "
            "says which of them are padding. Pass that one.",
            rule="T-MASK",
        )
    real: Array = mask.detach().cpu().numpy() != 0
    return real


def _refuse_packed(position_ids: Any, real: npt.NDArray[np.bool_]) -> None:
    """Several sequences in one batch place restart the positions; their rows would get wrong identities."""
    if position_ids is None or position_ids.ndim != 2:
        return
    positions = np.broadcast_to(position_ids.detach().cpu().numpy(), real.shape)
    if any((np.diff(row[mask]) != 1).any() for row, mask in zip(positions, real, strict=True)):
        raise Unsupported(
            "position_ids do not rise by one: several sequences are packed into one place of the batch. "
            "Pass one sequence a place, padded.",
            rule="T-PACKED",
        )


def new_tokens(forward: Forward, session: Session) -> dict[Handle, Array]:
    """Return the new real tokens of each request.

    Raises:
        Unsupported: `T-REWIND` when a request does not continue where it ended.
    """
    fresh = {}
    for b, handle in enumerate(forward.handles):
        held = int(forward.real[b, : forward.past].sum())
        known = len(session.requests[handle].tokens)
        if held != known:
            raise Unsupported(
                f"request {handle} has {known} tokens and its cache {held}: the cache was cropped, reordered "
                "or filled elsewhere. A recording follows requests that only grow.",
                rule="T-REWIND",
                request=handle,
            )
        fresh[handle] = forward.tokens[b][forward.real[b, forward.past :]]
    return fresh
