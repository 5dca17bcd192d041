"""Compile kernels/tk_gpu.cu where it is to run: NVRTC for CUDA, hipRTC for ROCm, through ctypes.

The libraries are those that torch's GPU wheels bring; no toolkit, no header and no torch is needed. What is
compiled is kept under the cache folder by the digest of sources, options, architecture and compiler.
hipRTC is called by the same names as NVRTC with another prefix; *it was not run here*.
"""

import ctypes
import ctypes.util
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tracekit
from tracekit.env import settings
from tracekit.errors import ProviderFailed, Unavailable

Kind = Literal["nvrtc", "hiprtc"]

ENTRY = "tk_gpu.cu"
HEADERS = ("tk_grad_block.h", "tk_grad.h", "tk_block.h", "tk_row.h", "tk_args.h", "tk_math.h")

_OPTIONS: dict[Kind, tuple[str, ...]] = {  # S1: no contraction, subnormals kept
    "nvrtc": ("-std=c++17", "--fmad=false", "--ftz=false"),
    "hiprtc": ("-std=c++17", "-O3", "-ffp-contract=off"),
}
_ARCH: dict[Kind, str] = {"nvrtc": "--gpu-architecture=", "hiprtc": "--offload-arch="}
_CODE: dict[Kind, str] = {"nvrtc": "nvrtcGetCUBIN", "hiprtc": "hiprtcGetCode"}
_PLACES: dict[Kind, tuple[str, ...]] = {
    "nvrtc": ("nvidia/*/lib/libnvrtc.so.*", "nvidia/cuda_nvrtc/lib/libnvrtc.so.*"),
    "hiprtc": ("torch/lib/libhiprtc.so*", "_rocm_sdk_core/lib/libhiprtc.so*"),
}
_TOOLKITS: dict[Kind, tuple[str, ...]] = {  # where images put them that the loader is not told of
    "nvrtc": ("usr/local/cuda/lib64/libnvrtc.so.*", "usr/local/cuda/targets/*/lib/libnvrtc.so.*"),
    "hiprtc": ("opt/rocm/lib/libhiprtc.so*",),
}


def sources() -> dict[str, str]:
    """Return the kernel and its headers by file name: as installed with the package, else those of the clone.

    Raises:
        Unavailable: `K-NO-SOURCE` where the installation lacks them.
    """
    installed = [Path(folder) / "_native" / "src" for folder in reversed(list(tracekit.__path__))]
    tree = [Path(folder).parent / "kernels" for folder in tracekit.__path__]  # a clone that is not installed
    for place in (*installed, *tree):
        if (place / ENTRY).is_file():
            return {name: (place / name).read_text() for name in (ENTRY, *HEADERS)}
    raise Unavailable(
        "this installation has no kernel sources; install tracekit again with `pip install`.",
        rule="K-NO-SOURCE",
    )


def find_library(kind: Kind, folders: Iterable[str] | None = None) -> Path | None:
    """Return the compiler's library: of a Python package (`folders`, else `sys.path`), else the system's."""
    for folder in sys.path if folders is None else folders:
        for pattern in _PLACES[kind]:
            found = sorted(p for p in Path(folder or ".").glob(pattern) if ".alt." not in p.name)
            if found:
                return found[-1]
    name = ctypes.util.find_library(kind)
    if name or folders is not None:
        return Path(name) if name else None
    found = sorted(path for pattern in _TOOLKITS[kind] for path in Path("/").glob(pattern))
    return found[-1] if found else None


@dataclass(frozen=True, eq=False)
class Compiler:
    """An opened run-time compiler.

    Args:
        kind: whose.
        version: as the library says it, `13.0`.
        handle: the library.
    """

    kind: Kind
    version: str
    handle: ctypes.CDLL

    def code(self, arch: str, dtype: int, *, ptx: bool = False) -> bytes:
        """Return the code of all kernels for one architecture, from the cache where it was made before.

        Args:
            arch: `sm_90` or `gfx942`; `compute_90` with `ptx`.
            dtype: of q, k, v and O, by number (`inputs.DTYPES`).
            ptx: the text of the PTX instead of a cubin.

        Raises:
            ProviderFailed: `K-COMPILE` with the words of the compiler.
            Unavailable: `K-NO-SOURCE`.
        """
        texts = sources()
        options = (*_OPTIONS[self.kind], f"{_ARCH[self.kind]}{arch}", f"-DTK_FIXED_TYPE={dtype}")
        kept = self._kept(texts, options, "ptx" if ptx else "bin")
        if kept.is_file():
            return kept.read_bytes()
        code = self._compile(texts, options, "nvrtcGetPTX" if ptx else _CODE[self.kind])
        with suppress(OSError):  # a cache that cannot be written costs the next process a compilation
            _write(kept, code)
        return code

    def _kept(self, texts: dict[str, str], options: tuple[str, ...], what: str) -> Path:
        sha = hashlib.sha256(f"{self.kind} {self.version} {options} {what}".encode())
        for name in sorted(texts):
            sha.update(f"\0{name}\0{texts[name]}".encode())
        return settings().cache / "kernels" / f"{sha.hexdigest()}.{what}"

    def _compile(self, texts: dict[str, str], options: tuple[str, ...], getter: str) -> bytes:
        program = ctypes.c_void_p()
        encoded = [(texts[name].encode(), name.encode()) for name in HEADERS]
        strings = ctypes.c_char_p * len(HEADERS)
        self._call(
            "CreateProgram",
            ctypes.byref(program),
            texts[ENTRY].encode(),
            ENTRY.encode(),
            len(HEADERS),
            strings(*(text for text, _ in encoded)),
            strings(*(name for _, name in encoded)),
        )
        try:
            words = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            compiled = getattr(self.handle, f"{self.kind}CompileProgram")(program, len(options), words)
            if compiled:
                said = self._bytes(program, f"{self.kind}GetProgramLog").decode(errors="replace")
                raise ProviderFailed(
                    f"{self.kind} {self.version} does not compile {ENTRY} with {' '.join(options)}: "
                    f"{said[:2000]}",
                    rule="K-COMPILE",
                )
            return self._bytes(program, getter)
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, getter: str) -> bytes:
        size = ctypes.c_size_t()
        prefix = self.kind
        self._call(getter.removeprefix(prefix) + "Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(getter.removeprefix(prefix), program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self.handle, f"{self.kind}{name}")(*arguments)
        if result:
            raise ProviderFailed(
                f"{self.kind} {self.version}: {name} ended with {result}.", rule="K-COMPILE", result=result
            )


def open_compiler(kind: Kind, path: Path | None = None) -> Compiler:
    """Open the compiler of a kind, at `path` or where `find_library` finds it.

    Raises:
        Unavailable: `K-NO-COMPILER` where there is none.
    """
    path = path or find_library(kind)
    if path is None:
        raise Unavailable(
            f"there is no {kind} library; torch's GPU wheels bring it (torch for CUDA or ROCm).",
            rule="K-NO-COMPILER",
            kind=kind,
        )
    for part in path.parent.glob("libnvrtc-builtins.so.*"):  # it looks for this one by name alone
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
    handle = ctypes.CDLL(str(path))
    major, minor = ctypes.c_int(), ctypes.c_int()
    getattr(handle, f"{kind}Version")(ctypes.byref(major), ctypes.byref(minor))
    return Compiler(kind, f"{major.value}.{minor.value}", handle)


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: another process may look for it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
