"""How long a replay of all goldens takes, with every claim that their kernels promise.

The peer is the budget of 60 s on two cores that continuous integration gives it.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from tools.bench.timing import Row

TRACES = Path(__file__).parents[2] / "traces"
BUDGET = 60.0


def rows(rounds: int) -> list[Row]:
    """Replay the goldens once for each three rounds that were asked for."""
    times = [once() for _ in range(max(1, rounds // 3))]
    return [Row("replay of all goldens", statistics.median(times), BUDGET, "budget", 1.0)]


def once() -> float:
    """Return the seconds of one replay, in a process of its own as a user starts it.

    Raises:
        CalledProcessError: a claim did not hold; its time says nothing.
    """
    traces = sorted(map(str, TRACES.glob("*.h5")))
    start = time.perf_counter()
    subprocess.run(
        [Path(sys.executable).with_name("tracekit"), "replay", *traces],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - start
