"""The tree that a run belongs to: digests of its files, and of what ran."""

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tools.gpu_acceptance.checks import Refused

ROOT = Path(__file__).parents[2]
_SOURCES = ("tracekit", "kernels", "tools/gpu_acceptance")
_SUFFIXES = (".py", ".h", ".cu", ".cpp")


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sources_here(root: Path = ROOT) -> str:
    """Return the digest of the sources as they lie in a tree: of the names and git blobs of all of them."""
    files = sorted(
        path
        for top in _SOURCES
        for path in (root / top).rglob("*")
        if path.suffix in _SUFFIXES and path.is_file()
    )
    blobs = {}
    for path in files:
        data = path.read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
        blobs[path.relative_to(root).as_posix()] = blob.hexdigest()
    return _digest(blobs)


def sources_of(commit: str, root: Path = ROOT) -> str:
    """Return the same digest of a commit.

    Raises:
        Refused: `EV-TREE`, this repository has no such commit.
    """
    # of the commit alone: 40 digits may also name a tree
    command = ["git", "-C", str(root), "ls-tree", "-r", f"{commit}^{{commit}}", "--", *_SOURCES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused("EV-TREE", f"this repository has no commit {commit[:12]}")
    lines = (line.split("\t", 1) for line in done.stdout.splitlines())
    return _digest({name: about.split()[2] for about, name in lines if name.endswith(_SUFFIXES)})


def _digest(blobs: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{name} {blobs[name]}\n" for name in sorted(blobs)).encode()).hexdigest()
