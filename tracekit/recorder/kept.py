"""What a session keeps of a launch until the requests have their keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tracekit.model import KVFamily, Mode
from tracekit.recorder.kv_log import Extent
from tracekit.recorder.observation import Handle, IndexerObservation, Observation


class Kept(NamedTuple):
    """A call that waits for the end: its rows are by handle, its KV is extents of the log.

    Args:
        step: the step that it belongs to.
        layer: its layer.
        mode: of the step.
        describe: makes the observation, without KV, from tensors that are owned.
        kv: the rows of each request that the launch read.
        size: bytes of its Q and outputs.
    """

    step: int
    layer: int
    mode: Mode
    describe: Callable[[], Observation]
    kv: dict[Handle, dict[KVFamily, Extent]]
    size: int


@dataclass(frozen=True, eq=False)
class KeptIndexer:
    """A launch of an indexer that waits likewise."""

    step: int
    seen: IndexerObservation
    token_ids: npt.NDArray[np.int64]
    keys: dict[Handle, Extent]
