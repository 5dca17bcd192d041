"""S15 across compilers and processors: clang, and NEON in an emulator, give the bits of the numpy form.

Skipped where the tool is missing. On Debian: `apt-get install clang g++-aarch64-linux-gnu qemu-user-static`.
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.tka1.cases import CASES, case, difference
from tracekit.providers.tka1 import Inputs, Lists, Outputs, Partials, native, numpy_form

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
INSTRUCTION_SETS = {
    "v1": [],
    "v3": ["-mavx2", "-mfma"],
    "v4": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"],
}


@pytest.mark.skipif(shutil.which("clang++") is None, reason="no clang++")
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_clang(isa: str, tmp_path: Path):
    if isa not in native.available():
        pytest.skip(f"this machine does not run {isa}")
    path = tmp_path / f"libtka1_{isa}.so"
    command = [
        "clang++",
        *FLAGS,
        *INSTRUCTION_SETS[isa],
        "-fPIC",
        "-shared",
        str(KERNELS / "tk_host.cpp"),
        "-o",
        str(path),
    ]
    subprocess.run(command, check=True)
    library = native.load_file(path, isa)

    for name in CASES:
        inputs = case(name)
        assert difference(library.run(inputs, 2), numpy_form.run(inputs)) == "", name
        assert difference(library.partials(inputs, 2), numpy_form.partials(inputs)) == "", name


@pytest.fixture(scope="module")
def neon(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs one launch on an emulated aarch64."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        pytest.skip("no aarch64 compiler or no emulator")
    program = tmp_path_factory.mktemp("neon") / "launch"
    command = [compiler, *FLAGS, "-static", f"-I{KERNELS}", str(HERE / "launch_main.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    return [emulator, str(program)]


def serialized(inputs: Inputs) -> bytes:
    """The input of launch_main.cpp."""
    (rows, heads, dim), requests = inputs.q.shape, len(inputs.families[0].keys)
    shape = (rows, heads, inputs.kv_heads, dim, inputs.value_dim, len(inputs.families), requests)
    sink = np.zeros(0, np.uint32) if inputs.sink is None else inputs.sink
    parts = [
        np.array([*shape, inputs.sink is not None, inputs.scale_bits], np.int64),
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
        (np.uint16, (rows, heads, width)),
        *((np.uint32, (rows, heads)),) * 2,
        (np.uint32, (rows, heads, width)),
        (np.uint32, (rows, heads)),
        (np.int32, (rows, heads)),
    ):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        got.append(np.frombuffer(answer[:size], dtype).reshape(shape))
        answer = answer[size:]
    assert answer == b""
    return Outputs(*got[:3]), Partials(*got[3:])


@pytest.mark.parametrize("name", CASES)
def test_neon(neon: list[str], name: str):
    inputs = case(name)
    out, part = launch(neon, inputs)
    assert difference(out, numpy_form.run(inputs)) == ""
    assert difference(part, numpy_form.partials(inputs)) == ""


WITHOUT_FMA = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-FMA4,-AVX2,-AVX512F"}


@pytest.fixture(scope="module")
def libm(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs one launch with the C library's own fmaf."""
    if platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64" or shutil.which("c++") is None:
        pytest.skip("no C++ compiler with glibc on x86-64")
    program = tmp_path_factory.mktemp("libm") / "launch"
    source = str(HERE / "launch_main.cpp")
    command = ["c++", *FLAGS, "-DTK_LIBM_FMA", f"-I{KERNELS}", source, "-o", str(program), "-ldl"]
    subprocess.run(command, check=True)
    return [str(program)]


def test_masking_the_hardware_changes_the_fmaf_that_runs(libm: list[str], best: native.Library):
    """Else the next test would compare the instruction with itself."""
    if best.isa == "v1":
        pytest.skip("this machine does not run v3")
    where = [
        subprocess.run([*libm, "where"], capture_output=True, check=True, env={**os.environ, **env}).stdout
        for env in ({}, WITHOUT_FMA)
    ]
    assert b"libm" in where[0]
    assert where[0] != where[1]


@pytest.mark.parametrize("name", ["wild", "underflowing", "two families"])
def test_the_software_fmaf_of_the_c_library(libm: list[str], name: str):
    inputs = case(name)
    out, part = launch(libm, inputs, WITHOUT_FMA)
    assert difference(out, numpy_form.run(inputs)) == ""
    assert difference(part, numpy_form.partials(inputs)) == ""
