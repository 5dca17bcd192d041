"""Every `TRACEKIT_*` variable, read once. A misspelt name is an error, and nothing is ever evaluated."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tracekit.errors import UsageError

KNOWN = {
    "TRACEKIT_CACHE": "folder for converted model files (default: ~/.cache/tracekit)",
    "TRACEKIT_THREADS": "threads of the CPU kernels (default: the cores of the machine)",
    "TRACEKIT_ISA": "build of the CPU kernel to use: v4 (AVX-512), v3 (AVX2), v1 (no FMA instruction)",
    "TRACEKIT_RECORD": "trace to write for each process in which an engine with a plug-in runs a model",
    "TRACEKIT_ENGINE": "record only this engine: transformers, vllm, megatron",
    "TRACEKIT_LAYERS": "layers to record, such as 0,3-5",
    "TRACEKIT_STEPS": "steps to record, likewise",
    "TRACEKIT_ROWS": "positions of the query rows to record, likewise",
    "TRACEKIT_INCLUDE": "globs, apart by commas: record rows whose layer's module or request matches one",
    "TRACEKIT_EXCLUDE": "globs likewise: do not record rows that match one",
    "TRACEKIT_MAX_SIZE_GB": "where a recording ends: so many 10^9 bytes of captured rows",
    "TRACEKIT_BACKEND": "kernel that engines with a plug-in run attention on: tka1 (default: their own)",
    "TRACEKIT_TIMEOUT": "seconds that a kernel in a child process may take for one launch (default: 300)",
}


MOST_THREADS = 4096
"""More than any machine has cores for; kernels count their work in multiples of it."""

LONGEST = 1_000_000
"""Seconds, eleven days: a wait is counted in milliseconds of 31 bits."""


@dataclass(frozen=True)
class Settings:
    """The environment, parsed."""

    cache: Path
    threads: int
    isa: str | None
    timeout: float
    record: Path | None = None
    engine: str | None = None
    filters: dict[str, Any] = field(default_factory=dict)
    """Arguments of `tracekit.record`, for processes that TRACEKIT_RECORD records."""
    backend: str | None = None


def parse_settings(environ: Mapping[str, str]) -> Settings:
    """Parse `TRACEKIT_*` out of an environment.

    Raises:
        UsageError: a name is unknown or a value is outside its range.
    """
    unknown = sorted(name for name in environ if name.startswith("TRACEKIT_") and name not in KNOWN)
    if unknown:
        raise UsageError(
            f"{unknown[0]} is not a setting of tracekit; the settings are {', '.join(KNOWN)}.",
            rule="V-UNKNOWN",
            name=unknown[0],
            valid=list(KNOWN),
        )
    isa = environ.get("TRACEKIT_ISA")
    if isa is not None and isa not in ("v1", "v3", "v4"):
        raise UsageError(f"TRACEKIT_ISA is {isa!r}; valid are v1, v3, v4.", rule="V-ISA", value=isa)
    if environ.get("TRACEKIT_RECORD") == "":
        raise UsageError(
            "TRACEKIT_RECORD is empty; give a path such as run.h5, or unset it.", rule="V-RECORD"
        )
    backend = environ.get("TRACEKIT_BACKEND")
    if backend not in (None, "tka1"):
        raise UsageError(
            f"TRACEKIT_BACKEND is {backend!r}; valid is tka1, or leave it unset.",
            rule="V-BACKEND-NAME",
            value=backend,
        )
    home = Path(environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return Settings(
        cache=Path(environ["TRACEKIT_CACHE"]).expanduser()
        if "TRACEKIT_CACHE" in environ
        else home / "tracekit",
        threads=check_threads(
            int(_positive(environ, "TRACEKIT_THREADS", usable_cores(), whole=True)), "TRACEKIT_THREADS"
        ),
        isa=isa,
        timeout=check_timeout(_positive(environ, "TRACEKIT_TIMEOUT", 300.0, whole=False), "TRACEKIT_TIMEOUT"),
        record=Path(environ["TRACEKIT_RECORD"]) if "TRACEKIT_RECORD" in environ else None,
        engine=environ.get("TRACEKIT_ENGINE"),
        filters=_filters(environ),
        backend=backend,
    )


def _filters(environ: Mapping[str, str]) -> dict[str, Any]:
    filters: dict[str, Any] = {}
    for name in ("layers", "steps", "rows"):
        filters[name] = parse_numbers(environ.get(f"TRACEKIT_{name.upper()}"), f"TRACEKIT_{name.upper()}")
    for name in ("include", "exclude"):
        text = environ.get(f"TRACEKIT_{name.upper()}", "")
        filters[name] = tuple(glob.strip() for glob in text.split(",") if glob.strip())
    if "TRACEKIT_MAX_SIZE_GB" in environ:
        filters["max_size_gb"] = _positive(environ, "TRACEKIT_MAX_SIZE_GB", 0.0, whole=False)
    return filters


def parse_numbers(text: str | None, option: str) -> frozenset[int] | None:
    """Parse `0,3,5-7` into a set of numbers; None stays None (no filter).

    Raises:
        UsageError: `U-NUMBERS` when a part is neither a number nor a range.
    """
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first > 100_000:
            raise UsageError(
                f"{option} takes numbers and ranges such as 0,3,5-7, not {text!r}.",
                rule="U-NUMBERS",
                option=option,
                value=text,
            )
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def usable_cores() -> int:
    """Return the cores that this process may use; macOS tells only how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(threads: int, name: str) -> int:
    """Return a number of threads; 0 stands for the default of a kernel.

    Raises:
        UsageError: `V-NUMBER`, it is below 0 or above `MOST_THREADS`.
    """
    if not 0 <= threads <= MOST_THREADS:
        raise UsageError(
            f"{name} is {threads}; it must be a number of threads up to {MOST_THREADS:,}.",
            rule="V-NUMBER",
            name=name,
            value=str(threads),
        )
    return threads


def check_timeout(seconds: float, name: str) -> float:
    """Return a limit of time that the operating system can wait for.

    Raises:
        UsageError: `V-NUMBER`, it is no number above 0 and up to `LONGEST`.
    """
    if not 0 < seconds <= LONGEST:
        raise UsageError(
            f"{name} is {seconds:g}; it must be a number of seconds above 0 and up to {LONGEST:,}.",
            rule="V-NUMBER",
            name=name,
            value=str(seconds),
        )
    return seconds


def check_budget(gigabytes: float, name: str) -> float:
    """Return a budget in units of 10^9 bytes.

    Raises:
        UsageError: `R-BUDGET`, it is no number above 0 and below 10^9.
    """
    if not 0 < gigabytes < 1e9:
        raise UsageError(
            f"{name} is {gigabytes:g}; it must be a number of 10^9 bytes above 0 and below 10^9.",
            rule="R-BUDGET",
            name=name,
            value=str(gigabytes),
        )
    return gigabytes


def _positive(environ: Mapping[str, str], name: str, default: float, *, whole: bool) -> float:
    text = environ.get(name)
    if text is None:
        return default
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e9:
        kind = "a whole number" if whole else "a number"
        raise UsageError(
            f"{name} is {text!r}; it must be {kind} above 0.", rule="V-NUMBER", name=name, value=text
        )
    return value


@cache
def settings() -> Settings:
    """Return the settings of this process, read at first use."""
    return parse_settings(os.environ)
