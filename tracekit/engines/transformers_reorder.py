"""Caches whose rows moved between two forwards, where a filter leaves out steps that would have shown it.

Beam search exchanges the tensors of a cache for ones in another order. A step that is recorded compares all
rows that it reads; one that a filter leaves out touches none. So the keys of one layer are remembered from
forward to forward: the same tensor is the same rows, and another one is compared.
"""

import weakref
from typing import Any

import torch


class Reorders:
    """Remembers the keys of the first layer of each cache."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Any, tuple[torch.Tensor, int]] = weakref.WeakKeyDictionary()

    def remember(self, cache: Any) -> None:
        """A forward has ended; this is what the next one should find."""
        keys = _keys(cache)
        if keys is not None:
            self._seen[cache] = keys, _version(keys)

    def moved(self, cache: Any) -> bool:
        """Whether a cache holds other rows than at the end of the forward before."""
        before, now = None if cache is None else self._seen.get(cache), _keys(cache)
        if before is None or now is None:
            return False
        keys, version = before
        if now is keys:
            return _version(now) != version
        return now.shape != keys.shape or not torch.equal(now.view(torch.uint8), keys.view(torch.uint8))


def _keys(cache: Any) -> torch.Tensor | None:
    layers = getattr(cache, "layers", None)
    keys = getattr(layers[0], "keys", None) if layers else None
    return keys if isinstance(keys, torch.Tensor) and keys.numel() else None


def _version(tensor: torch.Tensor) -> int:
    """How often torch wrote to a tensor in place; it does not count those of `inference_mode`."""
    return 0 if tensor.is_inference() else tensor._version
