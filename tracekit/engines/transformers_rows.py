"""The KV rows that the requests of a launch read: where they lie is found out once for like launches."""

from typing import Any, NamedTuple

import torch

from tracekit.engines.torch_bits import borrow
from tracekit.engines.transformers_families import Slots
from tracekit.engines.transformers_kernel import Arguments
from tracekit.model import DType, KVFamily
from tracekit.providers.torch_tensors import logical_dtype
from tracekit.recorder.observation import Borrowed, Handle, ReadKV, SeenKV
from tracekit.recorder.strip import Strip

Rows = dict[Handle, dict[KVFamily, SeenKV | ReadKV]]


class Part(NamedTuple):
    """How rows lie in the keys or the values of a launch; fields as those of `Strip`.

    Args:
        skip: bytes from the first element of the tensor to row 0 of head 0.
    """

    skip: int
    heads: int
    rows: int
    width: int
    between: int
    dtype: DType

    def strip(self, tensor: torch.Tensor) -> Strip:
        """Return the rows of a tensor."""
        skip, heads, rows, width, between, dtype = self
        return Strip(tensor.data_ptr() + skip, heads, rows, width, between, dtype, tensor)


class Place(NamedTuple):
    """Where the rows of one request and family stand in a launch."""

    handle: Handle
    family: KVFamily
    first: int
    keys: Part
    values: Part


def places(call: Arguments, slots: Slots, handles: list[Handle]) -> list[Place] | None:
    """Return where the rows of each request stand, for this launch and those that are alike.

    None where rows of a head have gaps, or the tensors are not plain ones in host memory: then each launch is
    looked at by itself.

    Raises:
        Unsupported: `T-DTYPE`.
    """
    if not _plain(call):
        return None
    found = []
    kinds = [(call.k, logical_dtype(call.k, "keys")), (call.v, logical_dtype(call.v, "values"))]
    for b, family, held, first in _held(slots):
        keys, values = (_part(tensor, b, held, dtype) for tensor, dtype in kinds)
        if keys is None or values is None:
            return None
        found.append(Place(handles[b], family, first, keys, values))
    return found


def rows_read(call: Arguments, slots: Slots, handles: list[Handle], at: list[Place] | None) -> Rows:
    """Return the rows of each request, family by family; one strip where keys and values are one tensor.

    Args:
        call: the launch.
        slots: what its key slots hold.
        handles: the request of each batch place.
        at: what `places` said of a launch that is alike.

    Raises:
        Unsupported: `T-DTYPE`.
    """
    read: Rows = {}
    if at is None or not _plain(call):
        return _looked_up(call, slots, handles)
    k, v = call.k, call.v
    for handle, family, first, keys, values in at:
        strips = (keys.strip(k),) if v is k else (keys.strip(k), values.strip(v))
        read.setdefault(handle, {})[family] = ReadKV(strips, first)
    return read


def _looked_up(call: Arguments, slots: Slots, handles: list[Handle]) -> Rows:
    keys = borrow(call.k, "keys")
    values = None if call.v is call.k else borrow(call.v, "values")
    read: Rows = {}
    for b, family, held, first in _held(slots):
        parts = [side and Borrowed(side.data[b][:, held], side.dtype) for side in (keys, values)]
        assert parts[0] is not None
        read.setdefault(handles[b], {})[family] = SeenKV(parts[0], parts[1], first)
    return read


def _held(slots: Slots) -> list[tuple[int, KVFamily, Any, int]]:
    """The key slots of each batch place and family, and the logical index of the first."""
    batch, found = slots.batch, []
    for b in batch.present:
        found.append((b, slots.family, batch.key_slots(b), batch.first_key(b)))
        if slots.compressed_family is not None:
            found.append((b, slots.compressed_family, slice(batch.keys, slots.keys), 0))
    return found


def _plain(call: Arguments) -> bool:
    """Whether the addresses of keys and values are those of their bits."""
    k, v = call.k, call.v
    return type(k) is type(v) is torch.Tensor and k.is_cpu and v.is_cpu


def _part(tensor: torch.Tensor, b: int, held: Any, dtype: DType) -> Part | None:
    """Return how some key slots of a batch place lie in `[B, Hkv, T, D]`; None where they have gaps."""
    size, (_, heads, slots, width) = tensor.itemsize, tensor.shape
    batch, between, row, element = tensor.stride()
    if not isinstance(held, slice) or element != 1 or row != width:
        return None
    start, stop, step = held.indices(slots)
    if step != 1:
        return None
    skip = (b * batch + start * row) * size
    return Part(skip, heads, max(stop - start, 0), row * size, between * size, dtype)
