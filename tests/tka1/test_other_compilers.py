"""S15 across compilers and processors: clang, and NEON in an emulator, give the bits of the numpy form.

Skipped where the tool is missing. On Debian: `apt-get install clang g++-aarch64-linux-gnu qemu-user-static`.
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tka1.cases import CASES, case, difference
from tools.portability import processes
from tools.portability.processes import WITHOUT_FMA, launch
from tracekit.providers.tka1 import native, numpy_form

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
    if missing := native.absent(isa):
        pytest.skip(missing)
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
    if processes.neon_tools() is None:
        pytest.skip("no aarch64 compiler or no emulator")
    return processes.neon(tmp_path_factory.mktemp("neon"))


@pytest.mark.parametrize("name", CASES)
def test_neon(neon: list[str], name: str):
    inputs = case(name)
    out, part = launch(neon, inputs)
    assert difference(out, numpy_form.run(inputs)) == ""
    assert difference(part, numpy_form.partials(inputs)) == ""


@pytest.fixture(scope="module")
def libm(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs one launch with the C library's own fmaf."""
    if platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64" or shutil.which("c++") is None:
        pytest.skip("no C++ compiler with glibc on x86-64")
    return processes.libm_fmaf(tmp_path_factory.mktemp("libm"))


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
