"""Forms of the C++ that run in a process of their own: another processor, or the C library's fmaf."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

from tools.portability.device import HERE, HOST_FLAGS, KERNELS
from tracekit.providers.tka1 import Inputs, Lists, Outputs, Partials
from tracekit.providers.tka1.inputs import DTYPES

WITHOUT_FMA = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-FMA4,-AVX2,-AVX512F"}
"""Hides the instructions from the C library, which then takes its own fmaf in software."""


def neon_tools() -> tuple[str, str] | None:
    """The aarch64 compiler and the emulator, where both are there."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    return (compiler, emulator) if compiler and emulator else None


def neon(folder: Path) -> list[str]:
    """Compile launch_main.cpp for aarch64 and return the command that runs it emulated."""
    tools = neon_tools()
    if tools is None:
        raise FileNotFoundError("no aarch64 compiler or no emulator")
    return [tools[1], _compiled(tools[0], folder / "launch_neon", "-static")]


def libm_fmaf(folder: Path) -> list[str]:
    """Compile launch_main.cpp with the C library's fmaf, and return the command that runs it."""
    return [_compiled("c++", folder / "launch_libm", "-DTK_LIBM_FMA", "-ldl")]


def _compiled(compiler: str, program: Path, *options: str) -> str:
    source = str(HERE / "launch_main.cpp")
    command = [compiler, *HOST_FLAGS, f"-I{KERNELS}", source, "-o", str(program), *options]
    subprocess.run(command, check=True)
    return str(program)


def serialized(inputs: Inputs) -> bytes:
    """The input of launch_main.cpp."""
    (rows, heads, dim), requests = inputs.q.shape, len(inputs.families[0].keys)
    shape = (rows, heads, inputs.kv_heads, dim, inputs.value_dim, len(inputs.families), requests)
    sink = np.zeros(0, np.uint32) if inputs.sink is None else inputs.sink
    parts = [
        np.array([*shape, inputs.sink is not None, inputs.scale_bits, DTYPES.index(inputs.dtype)], np.int64),
        inputs.q,
        inputs.request,
        sink,
    ]
    for family in inputs.families:
        for k, v, first in zip(family.keys, family.values, family.first, strict=True):
            parts += [np.array([len(k), first], np.int64), k, v]
        s = family.selection
        if isinstance(s, Lists):
            parts += [np.array([s.ids.size], np.int64), s.ids, s.offsets]
        else:
            parts += [np.array([-1], np.int64), s.lo, s.hi]
    return b"".join(part.tobytes() for part in parts)


def launch(
    command: list[str], inputs: Inputs, environ: dict[str, str] | None = None
) -> tuple[Outputs, Partials]:
    """Run launch_main.cpp on one launch."""
    env = None if environ is None else {**os.environ, **environ}
    data = serialized(inputs)
    answer = subprocess.run(command, input=data, capture_output=True, check=True, env=env).stdout
    rows, heads, width = *inputs.q.shape[:2], inputs.value_dim
    got = []
    for dtype, shape in (
        (inputs.dtype.container, (rows, heads, width)),
        *((np.uint32, (rows, heads)),) * 2,
        (np.uint32, (rows, heads, width)),
        (np.uint32, (rows, heads)),
        (np.int32, (rows, heads)),
    ):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        got.append(np.frombuffer(answer[:size], dtype).reshape(shape))
        answer = answer[size:]
    assert answer == b""
    out, lse, lse_with_sink, *part = got
    return Outputs(out, lse, lse_with_sink), Partials(*part)
