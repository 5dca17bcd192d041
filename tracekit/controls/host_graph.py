"""Fault: the plan of a captured launch stays that of the capture: lengths are baked in.

After FlashInfer #4647 (a bound of the host that decides a split) and vLLM #53821 (row starts of the capture).
"""

from tracekit.controls.captured import CapturedTwin, Spoiled
from tracekit.model import AttentionCall


class _Stale(Spoiled):
    def load(self, call: AttentionCall) -> None:
        """Write all inputs but the lengths; these are those of the first call."""
        super().load(call)
        bounds = [array for family in self.buffers.families for array in family.bounds]
        self.plan = getattr(self, "plan", None) or [array.copy() for array in bounds]
        for array, old in zip(bounds, self.plan, strict=True):
            array[...] = old


class StalePlan(CapturedTwin):
    """A kernel that reads, at every replay, by the lengths of the capture."""

    id = "twin-host-graph"
    fault = "lengths are those of the capture"
    spoiled = _Stale
