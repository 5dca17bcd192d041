"""The stage of compute-sanitizer: what it counts in a fresh process that answers a golden on the device."""

import re
import shutil
import subprocess

from tools.gpu_acceptance.run import Run
from tools.gpu_acceptance.stages import fresh


def sanitizer(run: Run) -> None:
    """Run the device under compute-sanitizer, where it exists: accesses, races, barriers."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if run.stand_in or tool is None:
        why = "a stand-in has no device code" if run.stand_in else "there is no compute-sanitizer here"
        run.add("sanitizer", "compute-sanitizer", "not run", why, provider=run.subject)
        return
    trace = min(run.traces, key=lambda path: path.stat().st_size)
    for kind in ("memcheck", "racecheck", "synccheck"):
        if run.left < 60:
            run.add("sanitizer", kind, "not run", "no time was left", provider=run.subject)
            continue
        command = [tool, "--tool", kind, "--error-exitcode", "9"]
        try:
            text = fresh(run, trace, *command)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            text = str(error)
        judge(run, kind, text, trace.name)


def judge(run: Run, kind: str, text: str, name: str) -> None:
    """Say what a tool found: nothing unless it counted its errors, whatever became of the program."""
    counted = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", text)
    if not counted or (not int(counted[-1]) and not re.search(r"^[0-9a-f]{64}$", text, re.MULTILINE)):
        run.add("sanitizer", kind, "not run", f"it did not end: {text[-400:]}", provider=run.subject)
        return
    errors = int(counted[-1])
    run.add(
        "sanitizer",
        kind,
        "refuted" if errors else "held",
        f"{errors} errors on {name}",
        provider=run.subject,
        compared=1,
        data={"runs": 1, "with errors": int(errors > 0)},
    )
