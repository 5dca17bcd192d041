"""`python -m tools.gpu_acceptance`: put TKA-1, and what GPU libraries are installed, to the test on this
device.

Takes under 10 minutes and needs no network: Python 3.11, torch 2.11, numpy, h5py, click, zstandard, xxhash.
Writes one JSON of evidence, which `python -m tools.gpu_acceptance.evidence keep` takes. Exit codes: 0
nothing was refuted, 1 something was, 2 something that the run needs is missing, 3 the device is not
bit-verified, 4 there is no device.
"""

import argparse
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.gpu_acceptance import needs
from tools.gpu_acceptance.evidence import ROOT, Evidence, file_digest, sources_here

STAND_IN = "the provider tka1 on the CPU"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_acceptance", description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=Path("gpu-evidence.json"), help="the evidence")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that this Python lacks")
    parser.add_argument("--commit", help="commit of the tree, where it is no git clone")
    parser.add_argument("--minutes", type=float, default=9.5, help="that the run may take")
    parser.add_argument("--golden", action="append", help="only this golden (may be given again)")
    parser.add_argument("--stand-in", action="store_true", help=f"let {STAND_IN} stand in for a device")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        needs.unpack(sorted(options.wheels.glob("*.whl")) if options.wheels else (), Path(folder))
        try:
            needs.check()
            commit = options.commit or _commit()
        except needs.Lacking as error:
            print(f"gpu_acceptance: {error}", file=sys.stderr)
            return 2
        subject = "tka1" if options.stand_in else _device()
        if subject is None:
            print(
                "gpu_acceptance: torch sees no CUDA or HIP device on this machine, so nothing was run.",
                file=sys.stderr,
            )
            return 4
        return _accept(options, subject, commit)


def _accept(options: argparse.Namespace, subject: str, commit: str) -> int:
    from tools.gpu_acceptance import run, speed, stages

    served = needs.build_kernels()
    folder = options.out.resolve().parent
    traces = tuple(path for path in run.goldens() if not options.golden or path.name in options.golden)
    stand_in = STAND_IN if options.stand_in else ""
    job = run.Run(subject, stand_in, options.minutes * 60, traces, folder)
    for name, work, seconds in (
        ("self-test", stages.self_test, 5.0),
        ("graphs", stages.graphs, 30.0),
        ("speed", speed.speed, 30.0),
        ("device", stages.device, 30.0),
        ("goldens", stages.new_goldens, 20.0),
        ("sanitizer", stages.sanitizer, 120.0),
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
    )
    options.out.write_text(found.to_json(), encoding="utf-8")
    own = [check for check in job.checks if check.provider == subject]
    refuted = [check for check in own if check.status == "refuted"]
    print(f"{len(job.checks)} checks, {len(refuted)} of {subject} refuted; evidence in {options.out}")
    verified = [check.status for check in own if check.stage == "self-test"] == ["held", "held"]
    return 1 if refuted else 0 if verified else 3


def _device() -> str | None:
    """The provider of TKA-1 for the device that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return None
    return "tka1-hip" if getattr(torch.version, "hip", None) else "tka1-cuda"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        done = None
    commit = done.stdout.strip() if done is not None and done.returncode == 0 else ""
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise needs.Lacking("this tree is no git clone; say which commit it is (--commit, 40 digits).")
    return commit


def _described(subject: str, served: str) -> dict[str, str]:
    if subject == "tka1":
        return {"name": STAND_IN, "arch": platform.machine(), "driver": "none", "compiler": served}
    from tracekit.errors import TracekitError
    from tracekit.providers.tka1_gpu import Device

    try:
        device = Device("hip" if subject == "tka1-hip" else "cuda")
    except (TracekitError, RuntimeError) as error:  # then nothing ran on it, and nothing is admitted
        return {"name": f"not usable: {error}"}
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
