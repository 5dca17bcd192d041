"""S1 in device code: the kernels for CUDA and HIP hold correctly rounded fma, mul and add, nothing else.

This says what compilers make of kernels/tk_gpu.cu. It is no run on a GPU.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.portability.device import CUDA_FLAGS, KERNELS
from tracekit.providers.tka1.inputs import DTYPES

SOURCE = str(KERNELS / "tk_gpu.cu")
HIP_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-nogpulib", "-nogpuinc")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
dtypes = pytest.mark.parametrize("dtype", range(len(DTYPES)))


def nvcc(*options: str) -> str:
    command = ["nvcc", *CUDA_FLAGS, *options, SOURCE]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


@needs_nvcc
@dtypes
def test_ptx_holds_only_correctly_rounded_operations(dtype: int, tmp_path: Path):
    ptx = tmp_path / "kernels.ptx"
    nvcc("-ptx", "-arch=sm_80", f"-DTK_FIXED_TYPE={dtype}", "-o", str(ptx))

    text = ptx.read_text()
    found = set(re.findall(r"^\s+(?:@!?%p\d+ )?(\w+(?:\.\w+)*\.f32(?:\.\w+)*)\s", text, re.MULTILINE))
    arithmetic = {name for name in found if not name.startswith(("ld.", "st.", "mov.", "setp.", "selp."))}
    exact = {"cvt.rn.f32.s32", "neg.f32", "cvt.rn.f32.u16"}  # the last for a dO in binary16, in any launch
    assert arithmetic == {"fma.rn.f32", "mul.rn.f32", "add.rn.f32"} | exact
    assert not re.search(r"\.ftz|\.approx|\batom|\bred\.|shfl", text)


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@dtypes
def test_cubins_keep_everything_in_registers(arch: str, dtype: int, tmp_path: Path):
    """A spill would be right and slow; the stack frame that stays is the stack of nodes."""
    cubin = str(tmp_path / "kernels.cubin")
    said = nvcc("-cubin", f"-arch={arch}", f"-DTK_FIXED_TYPE={dtype}", "-Xptxas", "-v", "-o", cubin)

    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert len(spills) == 7
    assert set(spills) == {("0", "0")}


def check_isa(text: str) -> None:
    """Raise AssertionError unless an AMD ISA text holds fma, mul and add f32 alone, in the IEEE mode."""
    found = set(re.findall(r"v_(?:pk_|dual_)?(\w+?)_f32", text))
    arithmetic = {name for name in found if not name.startswith("cmp")}
    assert (
        {"fma", "mul", "add"} <= arithmetic <= {"fma", "fmac", "fmaak", "fmamk", "mul", "add", "sub", "cvt"}
    )
    assert ".amdhsa_float_denorm_mode_32 3" in text  # subnormals kept in and out
    assert ".amdhsa_float_denorm_mode_32 0" not in text
    assert ".amdhsa_float_round_mode_32 0" in text  # to nearest even
    assert set(re.findall(r"[sv]gpr_spill_count:\s+(\d+)", text)) == {"0"}


@pytest.mark.skipif(shutil.which("clang++") is None, reason="no clang++")
@dtypes
def test_amdgcn_holds_only_correctly_rounded_operations(dtype: int, tmp_path: Path):
    assembly = tmp_path / "kernels.s"
    target = ["-x", "hip", "--cuda-device-only", "--offload-arch=gfx90a", f"-DTK_FIXED_TYPE={dtype}"]
    command = ["clang++", *target, *HIP_FLAGS, "-S", SOURCE, "-o", str(assembly)]
    subprocess.run(command, check=True)
    check_isa(assembly.read_text())


@pytest.mark.skipif(
    shutil.which("clang++-19") is None or shutil.which("ld.lld-19") is None, reason="no clang-19 with lld-19"
)
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_hip_code_objects_build_without_rocm(arch: str, tmp_path: Path):
    """Linked, for the arches of the MI200 and MI300; the compiler above knows the first only."""
    target = ["-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", f"--offload-arch={arch}"]
    for more, name in ((["-S"], "kernels.s"), ([], "kernels.hsaco")):
        command = ["clang++-19", *target, *HIP_FLAGS, *more, SOURCE, "-o", str(tmp_path / name)]
        subprocess.run(command, check=True)

    check_isa((tmp_path / "kernels.s").read_text())
    assert (tmp_path / "kernels.hsaco").read_bytes()[:4] == b"\x7fELF"


@needs_nvcc
def test_a_division_would_show(tmp_path: Path):
    """The control: with / in place of the reciprocal of S11 the scan of the PTX finds an operation more."""
    for path in KERNELS.glob("tk_*"):
        shutil.copy(path, tmp_path)
    row = tmp_path / "tk_row.h"
    text = row.read_text()
    assert text.count("end.reciprocal = tk_rcp(denominator);") == 1
    row.write_text(
        text.replace("end.reciprocal = tk_rcp(denominator);", "end.reciprocal = 1.0f / denominator;")
    )
    ptx = tmp_path / "kernels.ptx"
    command = ["nvcc", *CUDA_FLAGS, "-ptx", "-arch=sm_80", str(tmp_path / "tk_gpu.cu"), "-o", str(ptx)]
    subprocess.run(command, check=True)
    assert re.search(r"\b(div|rcp)\.\w+(\.ftz)?\.f32", ptx.read_text())
