"""Interleaved medians: each function takes its turn in every round, so that a slow minute hits them all."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SETTLE = 0.005
"""Seconds between two functions: worker threads of the one before may spin that long and hold a core."""


@dataclass(frozen=True)
class Row:
    """One comparison; times are medians in seconds, `peers` those of all peers, the best one included.

    A gate of 0 is none: the row is shown. `not_run` is the reason why there are no times; what was not run is
    never ok, and where it has a gate nothing is known of it.
    """

    name: str
    ours: float
    peer: float
    peer_name: str
    gate: float
    peers: dict[str, float] = field(default_factory=dict)
    not_run: str = ""

    @classmethod
    def unrun(cls, name: str, reason: str, gate: float = 0.0) -> "Row":
        """Make the row of what could not be timed here; `gate` is the one that it would have been held to."""
        return cls(name, math.nan, math.nan, "", gate, not_run=reason)

    @property
    def ratio(self) -> float:
        return self.peer / self.ours if self.ours else math.nan

    @property
    def ok(self) -> bool | None:
        """Whether the gate is met; None where there is none, or nothing was measured.

        A time that is a difference of two may come out below zero, and says nothing then.
        """
        measured = not self.not_run and self.ours > 0 and self.peer > 0
        return self.ratio >= self.gate if self.gate and measured else None

    def to_dict(self) -> dict[str, Any]:
        if self.not_run:
            return {"name": self.name, "not_run": self.not_run, "gate": self.gate, "ok": None}
        return {**asdict(self), "ratio": self.ratio, "ok": self.ok}


def exit_code(rows: Sequence[Row]) -> int:
    """Return how `--gate` ends: 1 a gate is missed, 3 one could not be judged, 0 all are met.

    The codes are those of a replay (docs/verdicts.md): without anything judged it is never 0.
    """
    gated = [row for row in rows if row.gate]
    if any(row.ok is False for row in gated):
        return 1
    return 0 if gated and all(row.ok for row in gated) else 3


def compare(
    name: str, ours: Callable[[], object], peers: Mapping[str, Callable[[], object]], gate: float, rounds: int
) -> Row:
    """Time ours against the best of some peers."""
    medians = interleaved({"": ours, **peers}, rounds)
    best = min(peers, key=lambda peer: medians[peer])
    return Row(name, medians[""], medians[best], best, gate, {peer: medians[peer] for peer in peers})


def interleaved(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each function; one untimed call comes before each timed one."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            settled = time.perf_counter() + SETTLE
            while time.perf_counter() < settled:  # busy, so that the core stays awake
                pass
            function()
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}
