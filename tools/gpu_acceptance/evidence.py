"""The evidence of an acceptance run: one JSON document, read back with suspicion.

`python -m tools.gpu_acceptance.evidence check FILE` reads one, `... keep FILE` also copies it to
`traces/evidence/`. What is malformed, of another tree, of other goldens, or of a stand-in, is refused with
the rule that it breaks.
"""

import argparse
import hashlib
import json
import math
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tools.gpu_acceptance.checks import (
    COMPARED,
    GPU_KERNELS,
    STAGES,
    STAND_IN,
    SUBJECTS,
    Check,
    Refused,
    fields,
    parse_check,
)
from tools.gpu_acceptance.tree import ROOT, file_digest, sources_of

KEPT = ROOT / "traces" / "evidence"
SCHEMA = "tracekit-gpu-evidence/1"
LARGEST = 4 << 20
"""Bytes of a document."""
LONGEST_RUN = 24 * 3600.0
CLOCKS = timedelta(days=1)
"""By which the clocks of two machines may differ."""

_WHEN = "%Y-%m-%dT%H:%M:%SZ"
_VERSION = r"\d+\.\d[\w.+-]*"
_SOFTWARE = {
    **dict.fromkeys(("python", "torch", "numpy", "h5py"), _VERSION),
    **dict.fromkeys(("cuda", "hip"), f"None|{_VERSION}"),
    "system": ".+",
}


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
        when: it ended, UTC, `2026-01-31T12:00:00Z`.
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
    when: str
    schema: str = SCHEMA

    def to_json(self) -> str:
        """Return the document, sealed."""
        record = asdict(self)
        return json.dumps({**record, "seal": seal(record)}, indent=1) + "\n"

    @property
    def subject(self) -> str:
        """The provider of TKA-1 that was put to the test."""
        return next(check.provider for check in self.checks if check.provider in {STAND_IN, *SUBJECTS})

    @property
    def providers(self) -> frozenset[str]:
        """Kernels of which something was compared on the device."""
        return frozenset(
            check.provider for check in self.checks if check.status in COMPARED and check.provider
        )


def now() -> str:
    """Return the time as `Evidence.when` has it."""
    return datetime.now(UTC).strftime(_WHEN)


def seal(record: Mapping[str, Any]) -> str:
    """Return the digest of a document without its seal: against damage and slips, and no signature."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def parse_evidence(text: str) -> Evidence:
    """Read a document.

    Raises:
        Refused: `EV-JSON`, `EV-SCHEMA`, `EV-SEAL`, `EV-FIELD`, `EV-COMMIT`, `EV-DIGEST`, `EV-TIME`,
            `EV-CHECK` or `EV-STAGE`.
    """
    record = _json(text)
    if record.get("schema") != SCHEMA:
        raise Refused("EV-SCHEMA", f"the schema is {record.get('schema')!r}, not {SCHEMA}")
    if record.pop("seal", None) != seal(record):
        raise Refused("EV-SEAL", "the document is not as the run wrote it")
    kinds: dict[str, type | tuple[type, ...]] = {
        **dict.fromkeys(("commit", "sources", "stand_in", "schema", "when"), str),
        **dict.fromkeys(("device", "software", "goldens", "new_goldens"), dict),
        "checks": list,
        "seconds": (int, float),
    }
    fields(record, kinds, "the document")
    for name in ("device", "software", "goldens", "new_goldens"):
        fields(record[name], dict.fromkeys(record[name], str), name)
    for name, version in _SOFTWARE.items():
        if set(record["software"]) != set(_SOFTWARE) or not re.fullmatch(version, record["software"][name]):
            raise Refused("EV-FIELD", f"software must name the versions of {', '.join(_SOFTWARE)}")
    if not re.fullmatch(r"[0-9a-f]{40}", record["commit"]):
        raise Refused("EV-COMMIT", f"{record['commit'][:50]!r} is no commit of 40 hexadecimal digits")
    for digest in (record["sources"], *record["goldens"].values(), *record["new_goldens"].values()):
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise Refused("EV-DIGEST", f"{digest[:70]!r} is no SHA-256")
    _time(record["when"], record["seconds"])
    checks = tuple(parse_check(number, one) for number, one in enumerate(record["checks"]))
    evidence = Evidence(**{**record, "checks": checks})
    _whole(evidence)
    return evidence


def _json(text: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name stands twice")
        return dict(pairs)

    def none(constant: str) -> None:
        raise ValueError(f"JSON has no {constant}")

    try:
        small = len(text.encode()) <= LARGEST
        record = json.loads(text, object_pairs_hook=once, parse_constant=none) if small else None
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise Refused("EV-JSON", f"this is no JSON object of at most {LARGEST:,} bytes")
    return record


def _time(when: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and 0 < seconds <= LONGEST_RUN):
        raise Refused("EV-TIME", f"a run does not take {seconds} seconds")
    try:
        at = datetime.strptime(when, _WHEN).replace(tzinfo=UTC)
    except ValueError:
        at = None
    if at is None or at.strftime(_WHEN) != when or at > datetime.now(UTC) + CLOCKS:
        raise Refused("EV-TIME", f"{when[:50]!r} is no time of a run that is over")


def _whole(evidence: Evidence) -> None:
    """Refuse checks that contradict each other, or what stands beside them."""
    checks = evidence.checks
    missing = [stage for stage in STAGES if stage not in {check.stage for check in checks}]
    if missing:
        raise Refused(
            "EV-STAGE", f"nothing is said of {', '.join(missing)}; a stage that did not run says so"
        )
    # a replay may report several faults of one golden, in the same words but for their reason
    told = Counter((c.stage, c.name, c.provider, "" if c.data else c.reason) for c in checks)
    if twice := [name for name, count in told.items() if count > 1]:
        raise Refused("EV-CHECK", f"{' '.join(twice[0][:3])} is told twice")
    subjects = {check.provider for check in checks} - {"", *GPU_KERNELS}
    if len(subjects) != 1 or (subjects == {STAND_IN}) is not bool(evidence.stand_in):
        raise Refused("EV-CHECK", f"{sorted(subjects)} were put to the test; it is one, and its own stand-in")
    made = {check.name for check in checks if check.stage == "goldens" and check.status == "measured"}
    if made != set(evidence.new_goldens):
        raise Refused("EV-CHECK", f"it made {sorted(made)}, and new are {sorted(evidence.new_goldens)}")
    absent = {check.provider for check in checks if (check.stage, check.name) == ("claims", "all")}
    verdicts = {check.provider for check in checks if check.stage == "claims" and check.data}
    if absent & verdicts:
        raise Refused("EV-CHECK", f"{sorted(absent & verdicts)} could not be made, and answered")
    known = set(evidence.goldens)
    silent = known - {check.name for check in checks if check.stage == "device"}
    if silent and not any(check.name == "device" for check in checks):
        raise Refused("EV-CHECK", f"the device and the CPU were not compared on {sorted(silent)[0]}")
    for check in checks:
        about = check.name if check.stage == "device" else check.name.split(" on ", 1)[-1]
        if check.stage in ("device", "claims") and check.data and about not in known:
            raise Refused("EV-CHECK", f"{check.name!r} is about no golden that was replayed")


def admit(evidence: Evidence, root: Path = ROOT) -> None:
    """Refuse what is no evidence about a device and this repository.

    Raises:
        Refused: `EV-STAND-IN`, `EV-DEVICE`, `EV-SELF-TEST`, `EV-GOLDEN` or `EV-TREE`.
    """
    if evidence.stand_in:
        raise Refused(
            "EV-STAND-IN", f"{evidence.stand_in} stood in for the device; that is no evidence of one"
        )
    _device(evidence)
    held = {check.name for check in evidence.checks if (check.stage, check.status) == ("self-test", "held")}
    if len(held) != 2:
        raise Refused("EV-SELF-TEST", "the self-test did not hold on the device, so nothing there is TKA-1")
    check_goldens(evidence, root)
    if evidence.sources != sources_of(evidence.commit, root):
        raise Refused("EV-TREE", f"what ran is not the tree of commit {evidence.commit[:12]}")


def _device(evidence: Evidence) -> None:
    """Hold the description of a device against the kernel that ran on it, and against torch."""
    names = ("name", "arch", "driver", "compiler")
    lacking = [name for name in names if not evidence.device.get(name)]
    if lacking or set(evidence.device) != set(names):
        raise Refused("EV-DEVICE", f"the device must have {', '.join(names)}, and nothing else")
    arch, compiler = SUBJECTS[evidence.subject]
    said = evidence.device["arch"], evidence.device["compiler"]
    if not re.fullmatch(arch, said[0]) or not re.fullmatch(compiler, said[1]):
        raise Refused("EV-DEVICE", f"{evidence.subject} does not run on {said[0]!r}, by {said[1]!r}")
    if not evidence.device["driver"].isdigit():
        raise Refused("EV-DEVICE", f"{evidence.device['driver']!r} is no version of a driver")
    vendor = evidence.subject.removeprefix("tka1-")
    if evidence.software[vendor] == "None":
        raise Refused("EV-DEVICE", f"torch {evidence.software['torch']} sees no {vendor.upper()} device")


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
        Refused: as `parse_evidence` and `admit`, and `EV-KEPT` where other evidence has that name.
    """
    text = read(path)
    evidence = parse_evidence(text)
    admit(evidence, root)
    folder = root / "traces" / "evidence"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{evidence.device['arch']}-{evidence.commit[:12]}.json"
    if folder.is_symlink() or kept.is_symlink() or (kept.exists() and read(kept) != text):
        raise Refused(
            "EV-KEPT", f"{kept} is there already, or leads elsewhere; evidence is never written over"
        )
    write(kept, text)
    return kept


def read(path: Path) -> str:
    """Return the text of a document; of a longer file no more than shows that it is too long."""
    with path.open("rb") as file:
        return file.read(LARGEST + 1).decode("utf-8")


def write(path: Path, text: str) -> None:
    """Write a document whole or not at all; what goes wrong is an `OSError`, and leaves nothing behind."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_acceptance.evidence", description=__doc__)
    parser.add_argument("verb", choices=("check", "keep"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.verb == "keep":
            print(f"kept as {keep(options.file)}")
        else:
            evidence = parse_evidence(read(options.file))
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
