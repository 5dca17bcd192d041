"""Fault: keys wait in a workspace that is given back before the replay, and other work writes there.

After FlashInfer #4430 (a workspace that nobody owns) and private pools that were shared by two graphs.
"""

import numpy as np

from tracekit.controls.captured import CapturedTwin, Spoiled
from tracekit.model import AttentionCall


class _Shared(Spoiled):
    def load(self, call: AttentionCall) -> None:
        """Copy keys into a workspace, point the tables there, and let go of it."""
        super().load(call)
        for family in self.buffers.families:
            workspace = self.buffers.pool.empty(family.keys.shape, family.keys.dtype)
            workspace[...] = family.keys
            moved = workspace.ctypes.data - family.keys.ctypes.data
            family.table[:, 0] += np.where(family.table[:, 0] != 0, moved, 0)


class WorkspaceShared(CapturedTwin):
    """A kernel that reads keys from a workspace which belongs to everybody."""

    id = "twin-host-graph-workspace"
    fault = "keys lie in a workspace that other work takes"
    spoiled = _Shared
