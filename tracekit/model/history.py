"""The history of a recording: what the engine said that it did, in order, so that it can be judged later.

A pass stands for one launch in every layer. What each launch read is not repeated here: the calls of the
trace say it, and a judge compares the two.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tracekit.model.events import (
    Adopt,
    Capture,
    Evict,
    Fence,
    Finish,
    Fork,
    GateMode,
    Migrate,
    NewWeights,
    Preempt,
    Rescale,
    ResetCache,
    Rollback,
    Sleep,
    Wake,
)


class PassRows(NamedTuple):
    """The rows of one request in a pass: positions `first .. end - 1`."""

    request: str
    first: int
    end: int
    mode: GateMode
    cache_version: int = 0


@dataclass(frozen=True, slots=True)
class Pass:
    """All layers computed the same rows, or began to.

    Where a request reads rows that another computes in the same launch, the step has several passes: the
    giver's, an `Adopt`, and the taker's.

    Args:
        step: the step of the trace; its calls are those of its passes.
        rows: request by request.
        model_version: weights that were in force.
        failed: whether the forward raised; then the engine is to drop its rows.
        layers: the layers that computed them; empty where all did. Activation checkpointing computes those
            again that were checkpointed.
        owing: layers whose launches are to have gradients.
    """

    step: int
    rows: tuple[PassRows, ...]
    model_version: int = 0
    failed: bool = False
    layers: tuple[int, ...] = ()
    owing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PassBackward:
    """The gradients of launches of a pass were computed.

    Args:
        step: the step of the pass; of its recompute where the launch was made again.
        layers: in the order in which they had theirs.
        kernel: the kernel that computed them; its forward is to be the same one.
        model_version: weights that were in force.
        retained: whether the graph was kept, so that they may be computed again.
    """

    step: int
    layers: tuple[int, ...]
    kernel: str
    model_version: int = 0
    retained: bool = False


@dataclass(frozen=True, slots=True)
class Unproven:
    """Something of the history is not known, and nobody may call it legal; what is illegal in it still is.

    Args:
        reason: what is not known, in words. Alone, the entry says why there is no history.
    """

    reason: str


Entry = (
    Pass
    | PassBackward
    | Unproven
    | Preempt
    | Rollback
    | Fork
    | Adopt
    | Evict
    | Finish
    | Migrate
    | NewWeights
    | ResetCache
    | Rescale
    | Sleep
    | Wake
    | Fence
    | Capture
)
"""One thing that happened."""
