"""What a session keeps of a launch until the requests have their keys."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.model import KVFamily, Mode
from tracekit.recorder.kv_log import Extent
from tracekit.recorder.observation import Handle, IndexerObservation, Observation


@dataclass(frozen=True, eq=False)
class Kept:
    """A call that waits for the end: its rows are by handle, its KV is extents of the log."""

    step: int
    mode: Mode
    seen: Observation
    token_ids: npt.NDArray[np.int64]
    kv: dict[Handle, dict[KVFamily, Extent]]


@dataclass(frozen=True, eq=False)
class KeptIndexer:
    """A launch of an indexer that waits likewise."""

    step: int
    seen: IndexerObservation
    token_ids: npt.NDArray[np.int64]
    keys: dict[Handle, Extent]
