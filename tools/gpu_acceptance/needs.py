"""What the acceptance run needs of a machine, checked before anything of tracekit is imported.

The machine may have no network and no installation of tracekit: the tree is used as it lies there, wheels
that are given are unpacked, and the CPU kernels are built with whatever C++ compiler there is.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = ("numpy", "torch", "h5py", "click", "zstandard", "xxhash")
OLDEST = {"python": (3, 11), "torch": (2, 11)}

_FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread"),
    *("-fvisibility=hidden", "-fPIC", "-shared"),
)
_BUILDS = {  # as CMakeLists.txt
    "v1": (),
    "v3": ("-mavx2", "-mfma"),
    "v4": (
        *("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"),
        "-mprefer-vector-width=512",
    ),
}


class Lacking(Exception):
    """Something that the run needs is not there; the text is one sentence."""


def wheels(folder: Path | None) -> tuple[Path, ...]:
    """Return the wheels of a folder that was given.

    Raises:
        Lacking: there are none in it.
    """
    found = tuple(sorted(folder.glob("*.whl"))) if folder else ()
    if folder and not found:
        raise Lacking(f"there is no wheel in {folder}; give the folder that holds them (--wheels).")
    return found


def room(out: Path) -> None:
    """Refuse a place where evidence cannot be written, before ten minutes are spent on it.

    Raises:
        Lacking: the folder is not there or not writable, or something of the name of an output is.
    """
    folder = out.resolve().parent
    there = [
        path for path in (out, *sorted(folder.glob("device.*.h5"))) if path.exists() or path.is_symlink()
    ]
    if there:
        raise Lacking(f"{there[0]} is there already and is not written over; give a new folder (--out).")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Lacking(f"nothing can be written in {folder}: {error}.") from error


def unpack(given: Iterable[Path], into: Path) -> None:
    """Make wheels importable here and in the processes that are started from here.

    Raises:
        Lacking: one is damaged, or there is no room for it.
    """
    for wheel in given:
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
        except (zipfile.BadZipFile, OSError) as error:
            raise Lacking(f"the wheel {wheel} cannot be unpacked: {error}.") from error
    sys.path.insert(0, str(into))
    paths = [str(into), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def check() -> None:
    """Refuse a machine that lacks something.

    Raises:
        Lacking: Python or torch is too old, or modules are missing.
    """
    if sys.version_info[:2] < OLDEST["python"]:
        raise Lacking(f"this is Python {sys.version.split()[0]}; the acceptance run needs 3.11 or newer.")
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise Lacking(
            f"the acceptance run needs {', '.join(missing)}, which this Python has not; give a folder with "
            "their wheels (--wheels), or install them."
        )
    try:
        import torch
    except (ImportError, OSError) as error:  # a library of it is damaged or missing
        raise Lacking(f"torch is installed and cannot be imported: {str(error).splitlines()[0]}.") from error
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST["torch"]:
        raise Lacking(f"this is torch {torch.__version__}; the acceptance run needs 2.11 or newer.")


def build_kernels() -> str:
    """Build the CPU kernels into the tree where no build is found; return what serves `tka1` on the CPU."""
    from tracekit.providers.tka1 import native, serving

    if not native.available():
        build(ROOT / "tracekit" / "_native")
        native._files.cache_clear()
        native._best.cache_clear()
    served = serving()
    return served.isa or served.form


def build(folder: Path, builds: Iterable[str] = tuple(_BUILDS)) -> None:
    """Compile builds of the CPU kernels; one that the compiler refuses is left out."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return
    try:
        folder.mkdir(exist_ok=True)
    except OSError:  # the tree may be read, and no more
        return
    for isa in builds:
        library = folder / f"libtka1_{isa}.so"
        made = library.with_suffix(".tmp")  # whole or not at all: one that is there is loaded
        command = [compiler, *_FLAGS, *_BUILDS[isa], str(ROOT / "kernels" / "tk_host.cpp"), "-o", str(made)]
        if subprocess.run(command, check=False, capture_output=True).returncode == 0:
            made.replace(library)
        made.unlink(missing_ok=True)
