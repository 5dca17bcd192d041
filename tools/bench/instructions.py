"""Instructions of TKA-1, counted by callgrind: what a slower kernel shows where no clock can be trusted.

`python -m tools.bench.instructions` counts small launches of the shapes in tools/bench/kernels_shapes.py, one
thread, inside `tka1_run` alone, and compares them with tools/bench/instructions.json; `--pin` writes that.
The emulator has no AVX-512, so the AVX2 and the SSE2 forms are counted. A count belongs to a compiler: those
of another one are shown and not judged. `--gate` ends with 1 where a count is not the pinned one, and with 3
where nothing, or not everything, could be judged.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.bench import kernels_shapes
from tools.portability.device import HERE, KERNELS
from tools.portability.processes import serialized
from tracekit.providers.tka1 import Inputs

PINNED = Path(__file__).with_name("instructions.json")
TOLERANCE = 0.02
"""Above the pin by more than this share is a regression, below it a pin that says too little."""
FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
"""Those of CMakeLists.txt."""
FORMS = {"AVX2": ("-mavx2", "-mfma"), "SSE2": ()}
SHAPES: dict[str, Callable[[np.random.Generator], Inputs]] = {
    "DSV4 T=1": lambda rng: kernels_shapes.dsv4(rng, 1)[0],
    "Qwen3 prefill T=64": lambda rng: kernels_shapes.causal(rng, 64, 64)[0],
    "Qwen3 T=16 R=512": lambda rng: kernels_shapes.causal(rng, 16, 512)[0],
    "decode T=1 R=1024": lambda rng: kernels_shapes.causal(rng, 1, 1024)[0],
}


@dataclass(frozen=True)
class Count:
    """Instructions of a launch, and what is pinned for it; 0 is nothing."""

    name: str
    instructions: int
    pinned: int = 0

    @property
    def fault(self) -> str:
        """Say in one sentence what is wrong; empty where nothing is, or nothing is pinned."""
        if not self.pinned or abs(self.instructions / self.pinned - 1) <= TOLERANCE:
            return ""
        return (
            f"{self.name}: {self.instructions:,} instructions, pinned are {self.pinned:,}; "
            "if this is meant, run python -m tools.bench.instructions --pin"
        )


def missing() -> str:
    """Say why nothing can be counted here; empty where it can."""
    for program, reason in (("valgrind", "valgrind is not installed"), ("c++", "no C++ compiler")):
        if shutil.which(program) is None:
            return reason
    return ""


def compiler() -> str:
    """The compiler to whose code the counts belong; empty where there is none."""
    if shutil.which("c++") is None:
        return ""
    said, version, machine = (
        subprocess.run(["c++", *flags], capture_output=True, text=True, check=True).stdout.strip()
        for flags in (["--version"], ["-dumpfullversion", "-dumpversion"], ["-dumpmachine"])
    )
    return f"{'clang' if 'clang' in said else 'gcc'} {version} {machine}"


def pinned() -> dict[str, int]:
    """What is pinned for the compiler that is here, by name; nothing where the pins are of another one."""
    told = json.loads(PINNED.read_text()) if PINNED.exists() else {}
    return dict(told["counts"]) if told.get("compiler") == compiler() else {}


def counts(form: str, kernels: Path = KERNELS) -> Iterator[Count]:
    """Build a form and count the shapes, beside what is pinned for this compiler."""
    known = pinned()
    with tempfile.TemporaryDirectory() as name:
        program = Path(name) / "launch"
        source = str(HERE / "launch_main.cpp")
        subprocess.run(
            ["c++", *FLAGS, *FORMS[form], f"-I{kernels}", source, "-o", str(program), "-ldl"], check=True
        )
        for shape, make in SHAPES.items():
            found = count(program, make(np.random.default_rng(0)))
            title = f"{form} {shape}"
            yield Count(title, found, known.get(title, 0))


def count(program: Path, inputs: Inputs) -> int:
    """Instructions that one launch executes inside `tka1_run`, on one thread."""
    out = program.with_suffix(".callgrind")
    command = ["valgrind", "--tool=callgrind", "--toggle-collect=tka1_run", f"--callgrind-out-file={out}"]
    subprocess.run([*command, str(program), "1"], input=serialized(inputs), capture_output=True, check=True)
    found = re.search(r"^(?:summary|totals): (\d+)$", out.read_text(), re.MULTILINE)
    if found is None or not int(found[1]):
        raise ValueError("callgrind saw no instruction of tka1_run; look at --toggle-collect")
    return int(found[1])


def main(arguments: list[str] | None = None) -> int:
    """Count, show, and with --gate judge."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.instructions", description=__doc__)
    parser.add_argument("--pin", action="store_true", help=f"write {PINNED.name}")
    parser.add_argument(
        "--gate", action="store_true", help="exit with 1 when a count is not the pinned one, 3 when unjudged"
    )
    options = parser.parse_args(arguments)

    if reason := missing():
        print(f"not run: {reason}, so nothing was counted; it is judged on a machine that has it.")
        return 3 if options.gate or options.pin else 0
    try:
        found = [one for form in FORMS for one in counts(form)]
    except subprocess.CalledProcessError as error:
        print(f"counting failed: `{error.cmd[0]}` ended with {error.returncode}; run it alone to see why.")
        return 6
    print(f"{'name':28} {'instructions':>14} {'pinned':>14}   ({compiler()}, within {TOLERANCE:.0%})")
    for one in found:
        state = ("no" if one.fault else "yes") if one.pinned else "not judged"
        print(f"{one.name:28} {one.instructions:14,} {one.pinned:14,}  {state}")
    if options.pin:
        data = {"compiler": compiler(), "counts": {one.name: one.instructions for one in found}}
        PINNED.write_text(json.dumps(data, indent=1) + "\n")
        return 0
    code = judge(found)
    return code if options.gate else 0


def judge(found: Sequence[Count]) -> int:
    """Say what is wrong with the counts, and return the exit code of `--gate`: 1, 3 (not all judged) or 0."""
    faults = [one.fault for one in found if one.fault]
    print(*faults, sep="\n", end="\n" if faults else "")
    unjudged = [one.name for one in found if not one.pinned]
    if unjudged or not found:
        print(
            f"inconclusive: {len(unjudged)} of {len(found)} counts have no pin for {compiler()}; run it "
            f"with the compiler that {PINNED.name} names, or pin these with --pin."
        )
    return 1 if faults else 3 if unjudged or not found else 0


if __name__ == "__main__":
    sys.exit(main())
