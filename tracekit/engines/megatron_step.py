"""One forward of a Megatron model: which tokens of which sequences stand in which slots of its launches.

Megatron's training data comes in three shapes, and all are one word here: a slot holds a token of a request,
or padding. A padded batch has one request a batch place. A batch place that packs documents restarts its
`position_ids` at each. A packed launch (`thd`) has one batch place and says with `cu_seqlens` where each
sequence begins.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tracekit.canonical.packed import PackedBatch
from tracekit.errors import Unsupported
from tracekit.model import Array
from tracekit.recorder.observation import Handle


@dataclass(eq=False)
class Slots:
    """What stands in the slots of a launch.

    Args:
        segment: int32 `[B, S]`, the request in each slot: 0, 1, ... in the order of their first slots; -1 for
            padding.
        place: int64 `[B, S]`, the position of each slot in its request.
        packed: whether the launch is `thd`.
    """

    segment: npt.NDArray[np.int32]
    place: npt.NDArray[np.int64]
    packed: bool

    @property
    def batch(self) -> int:
        """B."""
        return int(self.segment.shape[0])

    @property
    def length(self) -> int:
        """S."""
        return int(self.segment.shape[1])

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return int(self.segment.max(initial=-1)) + 1

    @property
    def row_slots(self) -> npt.NDArray[np.int64]:
        """The slot `b * S + s` of each row, int64 `[T]`: request by request, ascending."""
        return np.flatnonzero(self.segment.reshape(-1) >= 0)

    @property
    def request(self) -> npt.NDArray[np.int32]:
        """The request of each row, int32 `[T]`."""
        request: npt.NDArray[np.int32] = self.segment.reshape(-1)[self.row_slots]
        return request

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """The position of each row, int64 `[T]`."""
        positions: npt.NDArray[np.int64] = self.place.reshape(-1)[self.row_slots]
        return positions

    def slots_of(self, request: int) -> npt.NDArray[np.int64]:
        """The slots of one request, ascending."""
        return np.flatnonzero(self.segment.reshape(-1) == request)


@dataclass(eq=False)
class Forward(Slots):
    """One forward.

    Args:
        tokens: int64 `[B, S]`.
        handles: the requests, in the order of `Slots.segment`.
        recomputed: how often its launches were made again (activation checkpointing).
        checkpointed: launches that its backward has to make again.
        readings: what the layers of one forward share: the same mask is read once.
    """

    tokens: npt.NDArray[np.int64]
    handles: tuple[Handle, ...] = ()
    recomputed: int = 0
    checkpointed: int = 0
    readings: dict[Any, Any] = field(default_factory=dict)

    def open(self, open_request: Callable[[], Handle]) -> dict[Handle, Array]:
        """Open a request a segment and return the tokens of each."""
        self.handles = tuple(open_request() for _ in range(self.requests))
        tokens = self.tokens.reshape(-1)
        return {handle: tokens[self.slots_of(index)] for index, handle in enumerate(self.handles)}


def read_forward(given: Mapping[str, Any]) -> Forward:
    """Read the arguments of the model's forward.

    Args:
        given: by name.

    Raises:
        Unsupported: `M-INFERENCE`, `M-INPUT`, `M-PACKED`, `M-POSITION`, `M-EMPTY`.
        InvalidCall: `C-CU-...` for cumulative lengths that are none.
    """
    for name in ("inference_context", "inference_params"):
        if given.get(name) is not None:
            raise Unsupported(
                f"the forward has an {name}: Megatron's inference engine keeps KV of its own and goes around "
                "the core attention. Record training or plain forwards.",
                rule="M-INFERENCE",
            )
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise Unsupported(
            "the forward has no input_ids [B, S] (a middle stage of a pipeline gets none); rows are known by "
            "their tokens. Pass them to every stage.",
            rule="M-INPUT",
        )
    tokens = ids.detach().cpu().numpy().astype(np.int64)
    packed = given.get("packed_seq_params")
    if packed is not None:
        told = packed_slots(packed, tokens.shape)
        return _some(Forward(told.segment, told.place, True, tokens))
    real = _real(given, tokens.shape)
    segment = np.full(tokens.shape, -1, np.int32)
    place = np.zeros(tokens.shape, np.int64)
    positions = given.get("position_ids")
    count = 0
    for b, mine in enumerate(real):
        slots = np.flatnonzero(mine)
        starts = _starts(None if positions is None else _row(positions, b), slots)
        index = np.searchsorted(starts, np.arange(slots.size), side="right") - 1
        segment[b, slots] = count + index
        place[b, slots] = np.arange(slots.size) - starts[index]
        count += starts.size
    return _some(Forward(segment, place, False, tokens))


def _row(positions: torch.Tensor, b: int) -> npt.NDArray[np.int64]:
    """The position ids of one batch place; a batch of one stands for all."""
    row: npt.NDArray[np.int64] = positions[b if positions.shape[0] > 1 else 0].detach().cpu().numpy()
    return row


def _starts(positions: npt.NDArray[np.int64] | None, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where requests begin among the real slots of a batch place: at the first, and where positions restart.

    Raises:
        Unsupported: `M-POSITION` for positions that jump or begin above 0, as of a context parallel rank.
    """
    if positions is None or not slots.size:
        return np.zeros(min(slots.size, 1), np.int64)
    found = positions[slots]
    if found[0]:
        raise Unsupported(
            f"position_ids begin at {int(found[0])}; a request is recorded from position 0 on.",
            rule="M-POSITION",
        )
    jumps = np.flatnonzero(np.diff(found) != 1) + 1
    if found[jumps].any():
        at = int(jumps[np.argmax(found[jumps] != 0)])
        raise Unsupported(
            f"position_ids go from {int(found[at - 1])} to {int(found[at])}; they rise by one, or restart at "
            "0 where a packed document begins.",
            rule="M-POSITION",
        )
    return np.concatenate([np.zeros(1, np.int64), jumps])


def _real(given: Mapping[str, Any], shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Which slots hold a token: padding is what `padding_mask` names, and a slot whose key no query reads.

    A batch whose padding is only known to the loss looks like tokens to the model, and is recorded as such.
    """
    real = np.ones(shape, np.bool_)
    named = given.get("padding_mask")
    if isinstance(named, torch.Tensor) and tuple(named.shape) == shape:
        real &= ~named.detach().cpu().numpy().astype(np.bool_)
    mask = given.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.ndim == 4:
        read = (~mask[:, 0]).any(1).detach().cpu().numpy()
        if read.shape[1] == shape[1]:
            real &= read
    return real


def packed_slots(params: Any, shape: tuple[int, ...]) -> Slots:
    """Read `PackedSeqParams`.

    Args:
        params: Megatron's.
        shape: `[B, S]` of the tokens.

    Raises:
        Unsupported: `M-PACKED`.
        InvalidCall: `C-CU-...` for cumulative lengths that are none.
    """
    starts = params.cu_seqlens_q
    padded = params.cu_seqlens_q_padded
    own = (
        params.qkv_format == "thd"
        and shape[0] == 1
        and starts is not None
        and _equal(starts, params.cu_seqlens_kv)
        and _equal(padded, params.cu_seqlens_kv_padded)
        and (getattr(params, "local_cp_size", None) or 1) == 1
    )
    if not own:
        raise Unsupported(
            f"packed sequences of format {params.qkv_format} in a batch of {shape[0]}; those that are "
            "recorded are thd, one batch place, the same lengths for queries and keys, on one rank.",
            rule="M-PACKED",
        )
    batch = PackedBatch.of_cu_seqlens(
        starts.cpu().numpy(), shape[1], None if padded is None else padded.cpu().numpy()
    )
    segment = np.full(shape, -1, np.int32)
    place = np.zeros(shape, np.int64)
    # A sequence without tokens has no row, so those behind it move up.
    _, index = np.unique(batch.request, return_inverse=True)
    segment[0, batch.row_slots], place[0, batch.row_slots] = index, batch.positions()
    return Slots(segment, place, True)


def _some(forward: Forward) -> Forward:
    if not forward.requests:
        raise Unsupported("no slot of the batch holds a token: every key is masked.", rule="M-EMPTY")
    return forward


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return bool(torch.equal(one, other))
