"""`python -m tools.gpu_acceptance`: put TKA-1, and what GPU libraries are installed, to the test on this
device.

Takes under 10 minutes and needs no network: Python 3.11, torch 2.11, numpy, h5py, click, zstandard, xxhash.
Writes one JSON of evidence, which `python -m tools.gpu_acceptance.evidence keep` takes. Exit codes: 0
nothing was refuted, 1 something was, 2 something that the run needs is missing, or its evidence cannot be
written, 3 the device is not bit-verified, or a check of TKA-1 is inconclusive, 4 there is no device, 6 the
evidence contradicts itself, which is a fault of this tool.
"""

import argparse
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.gpu_acceptance import needs
from tools.gpu_acceptance.checks import Refused, plain
from tools.gpu_acceptance.evidence import Evidence, now, parse_evidence, write
from tools.gpu_acceptance.tree import ROOT, file_digest, sources_here

STAND_IN = "the provider tka1 on the CPU"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_acceptance", description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=Path("gpu-evidence.json"), help="the evidence")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that this Python lacks")
    parser.add_argument("--commit", help="commit of the tree, where it is no git clone")
    parser.add_argument("--minutes", type=_minutes, default=9.5, help="that the run may take")
    parser.add_argument("--golden", action="append", help="only this golden (may be given again)")
    parser.add_argument("--stand-in", action="store_true", help=f"let {STAND_IN} stand in for a device")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        try:
            needs.unpack(needs.wheels(options.wheels), Path(folder))
            needs.check()
            needs.room(options.out)
            commit = _commit(options.commit)
            traces = _goldens(options.golden)
            subject = "tka1" if options.stand_in else _device()
        except needs.Lacking as error:
            print(f"gpu_acceptance: {error}", file=sys.stderr)
            return 2
        if subject is None:
            print(
                "gpu_acceptance: torch sees no CUDA or HIP device on this machine, so nothing was run.",
                file=sys.stderr,
            )
            return 4
        try:
            return _accept(options, subject, commit, traces)
        except KeyboardInterrupt:
            print("gpu_acceptance: interrupted; no evidence was written.", file=sys.stderr)
            return 130


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes <= 600:
        raise argparse.ArgumentTypeError(f"{text} is no number of minutes; give up to 600")
    return minutes


def _accept(options: argparse.Namespace, subject: str, commit: str, traces: tuple[Path, ...]) -> int:
    from tools.gpu_acceptance import run, sanitizer, speed, stages

    served = needs.build_kernels()
    folder = options.out.resolve().parent
    stand_in = STAND_IN if options.stand_in else ""
    job = run.Run(subject, stand_in, options.minutes * 60, traces, folder)
    for name, work, seconds in (
        ("self-test", stages.self_test, 5.0),
        ("graphs", stages.graphs, 30.0),
        ("speed", speed.speed, 30.0),
        ("device", stages.device, 30.0),
        ("goldens", stages.new_goldens, 20.0),
        ("sanitizer", sanitizer.sanitizer, 120.0),
        ("claims", stages.claims, 30.0),
    ):
        job.stage(name, work, seconds)
    found = Evidence(
        commit=commit,
        sources=sources_here(),
        device=_described(subject, served),
        stand_in=stand_in,
        software=_software(),
        goldens={path.name: file_digest(path) for path in traces},
        checks=tuple(job.checks),
        new_goldens={path.name: file_digest(path) for path in job.made},
        seconds=job.seconds - job.left,
        when=now(),
    )
    return _told(found, options.out, subject)


def _told(found: Evidence, out: Path, subject: str) -> int:
    """Write the evidence, say what it comes to, and return the exit code; nothing that was found is lost."""
    text = found.to_json()
    try:
        write(out, text)
    except OSError as error:
        print(text)
        print(f"gpu_acceptance: {out} cannot be written ({error}); the evidence is above.", file=sys.stderr)
        return 2
    own = [check for check in found.checks if check.provider in ("", subject)]
    refuted = [check for check in own if check.status == "refuted"]
    nothing = [check for check in own if check.status == "inconclusive"]
    print(
        f"{len(found.checks)} checks; of {subject} {len(refuted)} refuted, {len(nothing)} inconclusive; "
        f"evidence in {out}"
    )
    try:
        parse_evidence(text)
    except Refused as error:
        print(f"gpu_acceptance: the evidence contradicts itself: {error}", file=sys.stderr)
        return 6
    verified = [check.status for check in own if check.stage == "self-test"] == ["held", "held"]
    return 1 if refuted else 0 if verified and not nothing else 3


def _goldens(names: list[str] | None) -> tuple[Path, ...]:
    from tools.gpu_acceptance.run import goldens

    found = tuple(path for path in goldens() if not names or path.name in names)
    unknown = sorted(set(names or ()) - {path.name for path in found})
    if unknown or not found:
        raise needs.Lacking(f"there is no golden {', '.join(unknown) or 'at all'} in traces/ of this tree.")
    return found


def _device() -> str | None:
    """The provider of TKA-1 for the device that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return None
    return "tka1-hip" if getattr(torch.version, "hip", None) else "tka1-cuda"


def _commit(given: str | None) -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False) if not given else None
    except FileNotFoundError:
        done = None
    commit = given or (done.stdout.strip() if done is not None and done.returncode == 0 else "")
    if not commit:
        raise needs.Lacking("this tree is no git clone; say which commit it is (--commit, 40 digits).")
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise needs.Lacking(f"{commit[:50]!r} is no commit; give all of its 40 digits (--commit).")
    return commit


def _described(subject: str, served: str) -> dict[str, str]:
    if subject == "tka1":
        return {"name": STAND_IN, "arch": platform.machine(), "driver": "none", "compiler": served}
    from tracekit.errors import TracekitError
    from tracekit.providers.tka1_gpu import Device

    try:
        device = Device("hip" if subject == "tka1-hip" else "cuda")
    except (TracekitError, RuntimeError) as error:  # then nothing ran on it, and nothing is admitted
        return {"name": plain(f"not usable: {error}")}
    compiler = f"{device.compiler.kind} {device.compiler.version}"
    return {"name": device.name, "arch": device.arch, "driver": device.driver.version, "compiler": compiler}


def _software() -> dict[str, str]:
    import h5py
    import numpy as np
    import torch

    cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
    return found | {
        "h5py": h5py.__version__,
        "cuda": str(cuda),
        "hip": str(hip),
        "system": platform.platform(),
    }


if __name__ == "__main__":
    sys.exit(main())
