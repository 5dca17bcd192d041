"""TKA-1 on the CPU against torch SDPA, two threads each: like against like, a process an instruction set.

With AVX-512 and with AVX2 both sides are confined to the same instructions, and the better of torch's bf16
and binary32 is the peer. A share is the part of the rate of a binary32 matmul. Where the processor has matrix
units for bf16 (AMX), torch with them is shown too, beside the bound: what a kernel would reach that does all
its operations at the rate of the binary32 matmul. TKA-1 is binary32 by definition, so these rows have no gate
(docs/adr/0012-like-against-like.md).
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.bench.kernels_shapes import MATMUL, Times
from tools.bench.timing import Row
from tracekit.providers.tka1 import native

AMX = "AMX"


@dataclass(frozen=True)
class Arena:
    """What both sides may use, the gates of the four shapes, and the gate of the shares of the first two."""

    name: str
    environ: dict[str, str]
    gates: tuple[float, ...]
    share: float = 0.0


ARENAS = (
    Arena(
        "AVX-512",
        {
            "TRACEKIT_ISA": "v4",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "ATEN_CPU_CAPABILITY": "avx512",
        },
        (1.5, 1.4, 1.1, 1.5),
        share=0.6,
    ),
    Arena(
        "AVX2",
        {
            "TRACEKIT_ISA": "v3",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
        },
        (0.9, 0.9, 0.9, 0.9),
    ),
    Arena(AMX, {"TRACEKIT_ISA": "v4"}, (0.0, 0.0, 0.0, 0.0)),
)


def rows(rounds: int) -> list[Row]:
    """Run the four shapes in every arena that this processor has."""
    found = []
    for arena in ARENAS:
        reason = missing(arena)
        gate = max(arena.gates)
        found += [Row.unrun(arena.name, reason, gate)] if reason else judged(arena, measured(arena, rounds))
    return found


def missing(arena: Arena) -> str:
    """Say why this processor cannot run an arena; empty where it can."""
    isa = arena.environ["TRACEKIT_ISA"]
    if not native.runs(isa):
        return f"this processor has no {arena.name if arena.name != AMX else 'AVX-512'}"
    if isa not in native.available():
        return f"{isa} was not built"
    if arena.name == AMX and "amx_bf16" not in cpu_flags():
        return "this processor has no matrix units for bf16"
    return ""


def cpu_flags() -> list[str]:
    """The flags of the first processor, as Linux tells them; none elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split() for line in lines if line.startswith("flags")), [])


def measured(arena: Arena, rounds: int) -> list[Times]:
    """Time the shapes in a process whose libraries may use what the arena allows."""
    limits = {key for other in ARENAS for key in other.environ}
    environ = {key: value for key, value in os.environ.items() if key not in limits}
    command = [sys.executable, "-m", "tools.bench.kernels_shapes", str(rounds)]
    child = subprocess.run(
        command, env=environ | arena.environ, stdout=subprocess.PIPE, text=True, check=True
    )
    return [Times(**times) for times in json.loads(child.stdout)]


def judged(arena: Arena, found: list[Times]) -> list[Row]:
    """Compare each shape with the better peer, then the first two with the matmul."""
    rows = []
    for times, gate in zip(found, arena.gates, strict=True):
        best = min(times.peers, key=lambda peer: times.peers[peer])
        bound = f", bound {times.peers[best] / times.matmul:.2f}" if arena.name == AMX else ""
        others = {**times.peers, MATMUL: times.matmul}
        rows.append(
            Row(f"{arena.name} {times.name}", times.ours, times.peers[best], best + bound, gate, others)
        )
    if arena.share:
        rows += [
            Row(f"{arena.name} {times.name}: share", times.ours, times.matmul, MATMUL, arena.share)
            for times in found[:2]
        ]
    return rows
