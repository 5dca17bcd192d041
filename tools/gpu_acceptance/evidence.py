"""The evidence of an acceptance run: one JSON document, read back with suspicion.

`python -m tools.gpu_acceptance.evidence check FILE` reads one, `... keep FILE` also copies it to
`traces/evidence/`. What is malformed, of another tree, of other goldens, or of a stand-in, is refused with
the rule that it breaks.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "traces" / "evidence"
SCHEMA = "tracekit-gpu-evidence/1"
STAGES = ("self-test", "device", "claims", "graphs", "speed", "sanitizer", "goldens")
COMPARED = frozenset({"held", "bounded", "refuted", "observed same", "observed varies"})
STATUSES = COMPARED | {"inconclusive", "not applicable", "not run", "measured"}
LARGEST = 4 << 20
"""Bytes of a document."""

_SOURCES = ("tracekit", "kernels", "tools/gpu_acceptance")
_SUFFIXES = (".py", ".h", ".cu", ".cpp")


class Refused(Exception):
    """A document is no evidence.

    Args:
        rule: the code of the rule that it breaks.
        why: one sentence.
    """

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(f"{why} ({rule})")
        self.rule = rule


@dataclass(frozen=True)
class Check:
    """One thing that was tried.

    Args:
        stage: one of `STAGES`.
        name: what, in a few words.
        status: one of `STATUSES`; `held` needs elements that were compared.
        reason: one clause.
        provider: the kernel.
        compared: elements, launches or processes that were compared.
        data: numbers of a measurement, or a verdict.
    """

    stage: str
    name: str
    status: str
    reason: str
    provider: str = ""
    compared: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """A run.

    Args:
        commit: of the tree, 40 hexadecimal digits.
        sources: digest of what ran (`sources_here`).
        device: name, arch, driver, compiler, of the device; of a stand-in its own words.
        stand_in: what stood in for a device, or an empty text.
        software: versions of Python, torch and others.
        goldens: file name -> SHA-256 of the traces that were replayed.
        checks: what was tried.
        new_goldens: file name -> SHA-256 of the traces that were made.
        seconds: how long it took.
        schema: `SCHEMA`.
    """

    commit: str
    sources: str
    device: Mapping[str, str]
    stand_in: str
    software: Mapping[str, str]
    goldens: Mapping[str, str]
    checks: tuple[Check, ...]
    new_goldens: Mapping[str, str]
    seconds: float
    schema: str = SCHEMA

    def to_json(self) -> str:
        """Return the document."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @property
    def providers(self) -> frozenset[str]:
        """Kernels of which something was compared on the device."""
        return frozenset(
            check.provider for check in self.checks if check.status in COMPARED and check.provider
        )


def parse_evidence(text: str) -> Evidence:
    """Read a document.

    Raises:
        Refused: `EV-JSON`, `EV-SCHEMA`, `EV-FIELD`, `EV-COMMIT`, `EV-DIGEST`, `EV-CHECK` or `EV-STAGE`.
    """
    try:
        record = json.loads(text) if len(text) <= LARGEST else None
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise Refused("EV-JSON", f"this is no JSON object of at most {LARGEST:,} bytes")
    if record.get("schema") != SCHEMA:
        raise Refused("EV-SCHEMA", f"the schema is {record.get('schema')!r}, not {SCHEMA}")
    kinds: dict[str, type | tuple[type, ...]] = {
        **dict.fromkeys(("commit", "sources", "stand_in", "schema"), str),
        **dict.fromkeys(("device", "software", "goldens", "new_goldens"), dict),
        "checks": list,
        "seconds": (int, float),
    }
    _fields(record, kinds, "the document")
    for name in ("device", "software", "goldens", "new_goldens"):
        if not all(isinstance(value, str) for value in record[name].values()):
            raise Refused("EV-FIELD", f"{name} must map names to text")
    if not re.fullmatch(r"[0-9a-f]{40}", record["commit"]):
        raise Refused("EV-COMMIT", f"{record['commit'][:50]!r} is no commit of 40 hexadecimal digits")
    for digest in (record["sources"], *record["goldens"].values(), *record["new_goldens"].values()):
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise Refused("EV-DIGEST", f"{digest[:70]!r} is no SHA-256")
    checks = tuple(_check(number, one) for number, one in enumerate(record["checks"]))
    missing = [stage for stage in STAGES if stage not in {check.stage for check in checks}]
    if missing:
        raise Refused(
            "EV-STAGE", f"nothing is said of {', '.join(missing)}; a stage that did not run says so"
        )
    return Evidence(**{**record, "checks": checks})


def _fields(record: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]], where: str) -> None:
    for name, kind in kinds.items():
        if name not in record or not isinstance(record[name], kind) or isinstance(record[name], bool):
            raise Refused("EV-FIELD", f"{where} has no {name}, or not as it must be")
    if unknown := sorted(set(record) - set(kinds)):
        raise Refused("EV-FIELD", f"{where} holds {unknown[0]}, which the schema does not know")


def _check(number: int, record: Any) -> Check:
    where = f"check {number}"
    if not isinstance(record, dict):
        raise Refused("EV-CHECK", f"{where} is no object")
    kinds: dict[str, type | tuple[type, ...]] = {
        **dict.fromkeys(("stage", "name", "status", "reason", "provider"), str),
        "compared": int,
        "data": dict,
    }
    _fields(record, kinds, where)
    check = Check(**record)
    if check.stage not in STAGES or check.status not in STATUSES or not check.reason or not check.name:
        raise Refused("EV-CHECK", f"{where} has the stage {check.stage!r}, the status {check.status!r}")
    if check.status in COMPARED and check.compared <= 0:
        raise Refused("EV-CHECK", f"{where}, {check.name}, is {check.status} and compared nothing")
    return check


def admit(evidence: Evidence, root: Path = ROOT) -> None:
    """Refuse what is no evidence about a device and this repository.

    Raises:
        Refused: `EV-STAND-IN`, `EV-DEVICE`, `EV-SELF-TEST`, `EV-GOLDEN` or `EV-TREE`.
    """
    if evidence.stand_in:
        raise Refused(
            "EV-STAND-IN", f"{evidence.stand_in} stood in for the device; that is no evidence of one"
        )
    lacking = [name for name in ("name", "arch", "driver", "compiler") if not evidence.device.get(name)]
    if lacking:
        raise Refused("EV-DEVICE", f"the device has no {', '.join(lacking)}")
    if not any(check.stage == "self-test" and check.status == "held" for check in evidence.checks):
        raise Refused("EV-SELF-TEST", "the self-test did not hold on the device, so nothing there is TKA-1")
    check_goldens(evidence, root)
    if evidence.sources != sources_of(evidence.commit, root):
        raise Refused("EV-TREE", f"what ran is not the tree of commit {evidence.commit[:12]}")


def check_goldens(evidence: Evidence, root: Path = ROOT) -> None:
    """Refuse evidence of other goldens than those of the tree.

    Raises:
        Refused: `EV-GOLDEN`.
    """
    if not evidence.goldens:
        raise Refused("EV-GOLDEN", "no golden was replayed")
    for name, digest in evidence.goldens.items():
        path = root / "traces" / name
        if Path(name).name != name or not path.is_file() or file_digest(path) != digest:
            raise Refused("EV-GOLDEN", f"{name} is not the golden of this tree")


def keep(path: Path, root: Path = ROOT) -> Path:
    """Admit a document and copy it to `traces/evidence/`; returns where.

    Raises:
        Refused: as `parse_evidence` and `admit`.
    """
    text = path.read_text(encoding="utf-8")
    evidence = parse_evidence(text)
    admit(evidence, root)
    folder = root / "traces" / "evidence"
    folder.mkdir(parents=True, exist_ok=True)
    arch = re.sub(r"[^a-z0-9_]", "-", evidence.device["arch"].lower())
    kept = folder / f"{arch}-{evidence.commit[:12]}.json"
    kept.write_text(text, encoding="utf-8")
    return kept


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
    command = ["git", "-C", str(root), "ls-tree", "-r", commit, "--", *_SOURCES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused("EV-TREE", f"this repository has no commit {commit[:12]}")
    lines = (line.split("\t", 1) for line in done.stdout.splitlines())
    return _digest({name: about.split()[2] for about, name in lines if name.endswith(_SUFFIXES)})


def _digest(blobs: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{name} {blobs[name]}\n" for name in sorted(blobs)).encode()).hexdigest()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_acceptance.evidence", description=__doc__)
    parser.add_argument("verb", choices=("check", "keep"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.verb == "keep":
            print(f"kept as {keep(options.file)}")
        else:
            evidence = parse_evidence(options.file.read_text(encoding="utf-8"))
            admit(evidence)
            print(
                f"{evidence.device['name']}: {len(evidence.checks)} checks, {len(evidence.goldens)} goldens"
            )
    except (Refused, OSError, UnicodeDecodeError) as error:
        print(f"{options.file}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
