"""S1 in device code: for CUDA and HIP the headers become correctly rounded fma, mul and add, nothing else.

This says what a compiler makes of them. It is no run on a GPU.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INCLUDE = f"-I{HERE.parents[1] / 'kernels'}"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_ptx_holds_only_correctly_rounded_operations(tmp_path: Path):
    ptx = tmp_path / "probe.ptx"
    options = ["-std=c++17", "-O3", "-fmad=false", "-ftz=false", "-arch=sm_80", INCLUDE]
    subprocess.run(["nvcc", *options, "-ptx", str(HERE / "device_probe.cu"), "-o", str(ptx)], check=True)

    found = set(re.findall(r"^\s+(\w+(?:\.\w+)*\.f32(?:\.\w+)*)\s", ptx.read_text(), re.MULTILINE))
    arithmetic = {name for name in found if not name.startswith(("ld.", "st.", "mov.", "setp.", "selp."))}
    assert arithmetic == {"fma.rn.f32", "mul.rn.f32", "add.rn.f32", "cvt.rn.f32.s32", "neg.f32"}


@pytest.mark.skipif(shutil.which("clang++") is None, reason="no clang++")
def test_amdgcn_holds_only_correctly_rounded_operations(tmp_path: Path):
    assembly = tmp_path / "probe.s"
    target = ["-x", "hip", "--cuda-device-only", "--offload-arch=gfx90a", "-nogpulib", "-nogpuinc"]
    options = ["-std=c++17", "-O3", "-ffp-contract=off", INCLUDE]
    source = str(HERE / "device_probe.cu")
    subprocess.run(["clang++", *target, *options, "-S", source, "-o", str(assembly)], check=True)

    text = assembly.read_text()
    found = set(re.findall(r"v_(\w+?)_f32", text))
    arithmetic = {name for name in found if not name.startswith("cmp")}
    assert {"fma", "mul", "add"} <= arithmetic <= {"fma", "fmac", "mul", "add", "sub", "cvt"}
    assert ".amdhsa_float_denorm_mode_32 3" in text  # subnormals kept in and out
    assert ".amdhsa_float_round_mode_32 0" in text  # to nearest even
