"""Run one side of the pair as a process of its own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 300
"""Seconds after which a side that hangs is stopped."""


def launch(side: str, folder: Path, *options: str, dies: bool = False) -> int:
    """Run `tools.pair.SIDE` and return its exit code.

    Args:
        side: `rollout` or `training`.
        folder: the run folder that it leaves.
        options: of its command line.
        dies: whether it shall be killed in the middle.

    Raises:
        RuntimeError: it failed of itself, and the message ends with what it said; or it hung.
    """
    command = [sys.executable, "-W", "ignore", "-m", f"tools.pair.{side}", str(folder.absolute()), *options]
    if dies:
        command.append("--dies")
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired as hung:
        raise RuntimeError(f"{side} did not end within {LIMIT} s and was stopped.") from hung
    if done.returncode and not dies:
        raise RuntimeError(f"{side} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.returncode
