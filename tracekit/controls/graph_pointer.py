"""Fault: an input is bound to a new buffer, and the graph reads the one that it was captured with.

After vLLM #48941 and verl #7455: a tensor object was exchanged behind a captured graph.
"""

from tracekit.controls.captured import CapturedTwin, Spoiled
from tracekit.model import AttentionCall


class _Exchanged(Spoiled):
    def load(self, call: AttentionCall) -> None:
        """Write Q into a new buffer; two blocks are taken, so that none comes back in turn."""
        old, new = self.buffers.q, self.buffers.pool.empty(self.buffers.q.shape, self.buffers.q.dtype)
        self.others = [*getattr(self, "others", []), self.buffers.pool.empty(old.shape, old.dtype)]
        self.buffers.q = new
        super().load(call)


class DeadPointer(CapturedTwin):
    """A kernel whose queries lie elsewhere at each launch."""

    id = "twin-host-graph-pointer"
    fault = "queries lie in a new buffer at each launch"
    spoiled = _Exchanged
